{{/* The bytes of 64GiB, 1.5TiB, 280Gi or "1073741824". */}}
{{- define "kvray.bytes" -}}
{{- $unit := . | toString | regexFind "[KMGT]i" -}}
{{- $bytes := dict "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 "" 1 -}}
{{- mulf (. | toString | regexFind "[0-9.]+" | float64) (get $bytes $unit) | int64 -}}
{{- end }}

{{/* The seconds of 90, 1e+06, 0.5, 250ms, 30s, 10m or 1h. */}}
{{- define "kvray.seconds" -}}
{{- $seconds := dict "ms" 0.001 "s" 1 "m" 60 "h" 3600 "d" 86400 "" 1 -}}
{{- mulf (. | toString | regexFind "[0-9.]+(e[+][0-9]+)?" | float64) (. | toString | regexFind "ms|s|m|h|d" | get $seconds) -}}
{{- end }}

{{/* Bytes, rounded up to whole GiB. */}}
{{- define "kvray.gi" -}}
{{- divf . 1073741824 | ceil | int64 -}}Gi
{{- end }}

{{/* The bytes of an arena's file at most. A row of the tables takes 300 bytes or less. */}}
{{- define "kvray.arenaBytes" -}}
{{- $capacity := include "kvray.bytes" .Values.kvray.arena.capacity | int64 -}}
{{- $slot := include "kvray.bytes" (.Values.kvray.arena.slot_min | default "64KiB") | int64 -}}
{{- add $capacity (mul 300 (div $capacity $slot)) 4194304 -}}
{{- end }}

{{/* The memory of a Ray worker: Ray kills workers above 95 % of it (RAY_memory_usage_threshold). */}}
{{- define "kvray.workerMemory" -}}
{{- $arena := include "kvray.arenaBytes" . | int64 -}}
{{- $store := include "kvray.bytes" .Values.worker.objectStore | int64 -}}
{{- $needed := divf (add $arena $store (include "kvray.bytes" .Values.worker.processes | int64)) 0.95 -}}
{{- $given := .Values.worker.memory -}}
{{- if not $given -}}
{{- include "kvray.gi" $needed -}}
{{- else if lt (include "kvray.bytes" $given | int64) ($needed | int64) -}}
{{- fail (printf "worker.memory %s is too little for an arena of %s beside Ray's object store of %s and %s of processes; leave it out, write at least %s, or lower kvray.arena.capacity." $given .Values.kvray.arena.capacity .Values.worker.objectStore .Values.worker.processes (include "kvray.gi" $needed)) -}}
{{- else -}}
{{- $given -}}
{{- end -}}
{{- end }}

{{/* Seconds for the shard to write to disk, and for Ray to end. */}}
{{- define "kvray.endS" -}}
{{- addf (include "kvray.seconds" (dig "nvme" "flush_s" 60 .Values.kvray) | float64) 60 | ceil | int64 -}}
{{- end }}

{{/* kvray.yaml: the user's, and what follows from the volumes and the worker group. */}}
{{- define "kvray.config" -}}
{{- range list "arena.dir" "nvme.dir" "shard.resource" "shard.label" "ray.address" -}}
{{- $at := splitList "." . -}}
{{- if hasKey (get $.Values.kvray (first $at) | default dict) (last $at) -}}
{{- fail (printf "The chart sets %s itself; leave kvray.%s out of the values." . .) -}}
{{- end -}}
{{- end -}}
{{- $set := dict "arena" (dict "dir" "/kvray") "shard" (dict "resource" "kvray_shard") "ray" (dict "address" "auto") -}}
{{- if .Values.disk.hostPath -}}
{{- $_ := set $set "nvme" (dict "dir" "/nvme") -}}
{{- end -}}
{{- mergeOverwrite (deepCopy .Values.kvray) $set | toYaml -}}
{{- end }}

{{/* What runs before the Ray worker's container ends; it has the pod's grace period. The shard
     writes to disk what is in memory only, if it has an NVMe tier, and ends. */}}
{{- define "kvray.preStop" -}}
pid=$(pgrep -o -f '^ray::Shard') && kill -TERM "$pid" && while kill -0 "$pid" 2>/dev/null; do sleep 0.5; done
{{- end }}

{{- define "kvray.labels" -}}
app.kubernetes.io/name: kvray
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "kvray.account" -}}
{{ .Values.serviceAccount.name | default (ternary .Release.Name "" .Values.serviceAccount.create) }}
{{- end }}

{{/* What every container has: image, rights, variables. Called with the root, image and extraEnv. */}}
{{- define "kvray.container" -}}
image: {{ .image }}
{{- with .root.Values.images.pullPolicy }}
imagePullPolicy: {{ . }}
{{- end }}
{{- with .root.Values.securityContext }}
securityContext: {{- toYaml . | nindent 2 }}
{{- end }}
{{- if or .token .extraEnv }}
env:
  {{- if .token }}
  {{- include "kvray.token" .root | nindent 2 }}
  # Else shards come last where engines keep all cores busy: Ray gives its workers 15.
  - {name: RAY_worker_niceness, value: "0"}
  {{- end }}
  {{- with .extraEnv }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}
{{- end }}

{{- define "kvray.secret" -}}
{{ .Values.auth.secret | default (printf "%s-auth" .Release.Name) }}
{{- end }}

{{/* Every Ray process needs the token. */}}
{{- define "kvray.token" -}}
- {name: RAY_AUTH_MODE, value: token}
- name: RAY_AUTH_TOKEN
  valueFrom: {secretKeyRef: {name: {{ include "kvray.secret" . }}, key: auth_token}}
{{- end }}

{{/* One user in every container: arena and socket are that user's alone. */}}
{{- define "kvray.user" -}}
{{- merge (deepCopy .Values.podSecurityContext) (dict "runAsUser" 1000 "runAsGroup" 1000 "fsGroup" 1000) | toYaml }}
{{- end }}

{{/* What every pod has. Called with the root, and the values of the nodes that it is for. */}}
{{- define "kvray.pod" -}}
{{- with .nodes.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .nodes.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .root }}
securityContext: {{- include "kvray.user" . | nindent 2 }}
{{- with include "kvray.account" . }}
serviceAccountName: {{ . }}
{{- end }}
{{- with .Values.images.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - {name: {{ . }}}
  {{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- define "kvray.mounts" -}}
- {name: config, mountPath: /etc/kvray}
{{- with .Values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "kvray.volumes" -}}
- name: config
  configMap: {name: {{ .Release.Name }}}
{{- with .Values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end }}
