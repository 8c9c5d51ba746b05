"""Which vLLM this plugin fits: a range of versions, and the signatures it holds on to, checked before anything runs."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
from dataclasses import dataclass
from typing import Any

from packaging.version import InvalidVersion, Version

from dropmatch.errors import DropMatchError

LOWEST, BELOW = "0.28", "0.34"
SUPPORTED = f">={LOWEST},<{BELOW}"


class UnsupportedVLLMError(DropMatchError):
    """A vLLM that this version of dropmatch does not fit, or a setting of it that the plugin cannot serve."""


@dataclass(frozen=True, slots=True)
class Seam:
    """A name inside vLLM that the plugin wraps or reads, with the parameters (or fields) it counts on, in order."""

    path: str
    parameters: tuple[str, ...]

    def find(self) -> Any:
        """The object. Raises ImportError or AttributeError where it is missing."""
        module, _, name = self.path.partition(":")
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
        return found

    def fits(self) -> bool:
        try:
            found = self.find()
        except (ImportError, AttributeError):
            return False
        fields = getattr(found, "_fields", None)
        names = tuple(fields if fields is not None else inspect.signature(found).parameters)
        return names[: len(self.parameters)] == self.parameters if fields is None else {*self.parameters} <= {*names}


COMMON = (
    Seam("vllm.v1.engine.core:EngineCore._initialize_kv_caches", ("self", "vllm_config")),
    Seam("vllm.v1.engine.core:EngineCore.add_request", ("self", "request", "request_wave")),
    Seam("vllm.v1.engine.core:EngineCoreProc.run_busy_loop", ("self",)),
    Seam("vllm.v1.core.sched.scheduler:Scheduler.update_from_output", ("self", "scheduler_output")),
    Seam("vllm.v1.core.sched.scheduler:Scheduler.make_stats", ("self", "spec_decoding_stats", "kv_connector_stats")),
    Seam("vllm.v1.metrics.loggers:StatLoggerManager.record", ("self", "scheduler_stats", "iteration_stats")),
    Seam("vllm.v1.engine.input_processor:InputProcessor._validate_params", ("self", "params")),
)
REQUESTS = tuple(
    Seam(f"vllm.entrypoints.openai.{module}.protocol:{name}.to_sampling_params", ("self",))
    for module, name in (
        ("completion", "CompletionRequest"),
        ("chat_completion", "ChatCompletionRequest"),
        ("responses", "ResponsesRequest"),
    )
)
V1 = (
    Seam(
        "vllm.v1.sample.rejection_sampler:rejection_sample",
        (
            "draft_token_ids",
            "num_draft_tokens",
            "max_spec_len",
            "cu_num_draft_tokens",
            "draft_probs",
            "target_logits",
            "bonus_token_ids",
            "sampling_metadata",
        ),
    ),
    Seam(
        "vllm.v1.worker.gpu_model_runner:ExecuteModelState",
        ("logits", "spec_decode_metadata", "hidden_states", "sample_hidden_states"),
    ),
    Seam("vllm.v1.worker.gpu_model_runner:GPUModelRunner.__init__", ("self", "vllm_config", "device")),
    Seam("vllm.v1.worker.gpu_model_runner:GPUModelRunner.sample_tokens", ("self", "grammar_output")),
    Seam("vllm.v1.worker.gpu_model_runner:GPUModelRunner._dummy_sampler_run", ("self", "hidden_states")),
    Seam(
        "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer._sample_draft_tokens",
        ("self", "hidden_states", "sampling_metadata"),
    ),
)
V2 = (
    Seam(
        "vllm.v1.worker.gpu.spec_decode.rejection_sampler:rejection_sample",
        (
            "target_logits",
            "draft_logits",
            "draft_sampled",
            "cu_num_logits",
            "pos",
            "idx_mapping",
            "expanded_idx_mapping",
            "expanded_local_pos",
            "temperature",
            "seed",
            "num_speculative_steps",
        ),
    ),
    Seam(
        "vllm.v1.worker.gpu.spec_decode.rejection_sampler:RejectionSampler.__call__",
        ("self", "logits", "input_batch", "draft_logits"),
    ),
    Seam("vllm.v1.worker.gpu.model_runner:GPUModelRunner.__init__", ("self", "vllm_config", "device")),
    Seam(
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner.sample",
        ("self", "hidden_states", "input_batch", "grammar_output"),
    ),
    Seam("vllm.v1.worker.gpu.model_runner:GPUModelRunner.sample_tokens", ("self", "grammar_output")),
    Seam("vllm.v1.worker.gpu.model_runner:GPUModelRunner._dummy_sampler_run", ("self", "hidden_states")),
    Seam("vllm.v1.worker.gpu.sample.sampler:Sampler.add_request", ("self", "req_idx")),
)


def check_vllm(seams: tuple[Seam, ...]) -> None:
    """Raise UnsupportedVLLMError, naming both versions, unless this vLLM is in range and has the seams."""
    version = vllm_version()
    try:
        # release only: a development build of 0.34 is no 0.33
        is_in_range = Version(LOWEST) <= Version(Version(version).base_version) < Version(BELOW)
    except InvalidVersion:
        is_in_range = False
    wrong = [] if not is_in_range else [seam.path for seam in seams if not seam.fits()]
    if is_in_range and not wrong:
        return
    why = f"it differs at {', '.join(wrong)}" if wrong else "that version is out of range"
    raise UnsupportedVLLMError(
        f"dropmatch {importlib.metadata.version('dropmatch')} supports vllm {SUPPORTED}, and this is vllm {version}: "
        f'{why}. Install a supported vllm, or remove "dropmatch" from --additional-config.'
    )


def vllm_version() -> str:
    import vllm

    return str(vllm.__version__)
