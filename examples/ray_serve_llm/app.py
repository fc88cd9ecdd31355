"""Two replicas of `ray.serve.llm` that share their KV blocks; see README.md."""

import os

from ray.serve.llm import LLMConfig, build_openai_app

import kvray.serve.llm  # noqa: F401 - registers the connector

engine_kwargs = {
    "block_size": 32,  # the same in all replicas
    "max_model_len": 2048,
    "kv_transfer_config": {"kv_connector": "KvRayConnector"},
}
hardware = {}
if os.environ.get("ON_CPU") == "1":
    engine_kwargs["enforce_eager"] = True  # to compile takes minutes
    hardware["accelerator_config"] = {"kind": "cpu"}
    hardware["placement_group_config"] = {"bundles": [{"CPU": 0.5}]}  # of each replica
config = LLMConfig(
    model_loading_config={
        "model_id": "smollm2",
        "model_source": os.environ.get("MODEL", "HuggingFaceTB/SmolLM2-135M-Instruct"),
    },
    deployment_config={"num_replicas": 2, "ray_actor_options": {"num_cpus": 0}},
    engine_kwargs=engine_kwargs,
    **hardware,
)
app = build_openai_app({"llm_configs": [config]})
