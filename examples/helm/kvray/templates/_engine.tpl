{{/* The container of TensorRT-LLM, its volumes, and who reaches it. */}}
{{- define "kvray.engine" -}}
- name: engine
  {{- include "kvray.container" (dict "root" . "image" .Values.images.engine "extraEnv" .Values.engine.extraEnv) | nindent 2 }}
  command: [trtllm-serve, {{ .Values.engine.model | quote }}, --host, 0.0.0.0, --port, "8000"]
  args:
    - --tp_size
    - {{ .Values.engine.gpus | quote }}
    - --extra_llm_api_options
    - /etc/kvray/connector.yaml
    {{- range .Values.engine.args }}
    - {{ . | quote }}
    {{- end }}
  ports:
    - {containerPort: 8000, name: http}
  readinessProbe: # of the engine alone
    httpGet: {path: /health, port: http}
    periodSeconds: 5
  startupProbe:
    httpGet: {path: /health, port: http}
    periodSeconds: 10
    failureThreshold: 180 # loading a model takes minutes
  resources:
    requests:
      cpu: {{ .Values.engine.cpu | quote }}
      memory: {{ .Values.engine.memory }}
      nvidia.com/gpu: {{ .Values.engine.gpus | quote }}
    limits:
      memory: {{ .Values.engine.memory }}
      nvidia.com/gpu: {{ .Values.engine.gpus | quote }}
  volumeMounts:
    {{- include "kvray.mounts" . | nindent 4 }}
    - {name: kvray, mountPath: /kvray}
    - {name: engine-dshm, mountPath: /dev/shm}
    - {name: models, mountPath: /models, readOnly: true}
{{- end }}

{{- define "kvray.engineVolumes" -}}
- name: engine-dshm # NCCL and MPI
  emptyDir: {medium: Memory, sizeLimit: {{ .Values.engine.shm }}}
- name: models
  persistentVolumeClaim: {claimName: {{ .Values.engine.modelClaim }}}
{{- end }}
