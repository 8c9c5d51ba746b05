"""dropmatch as a model of lm-evaluation-harness (lm-eval 0.4.13): generation through the engine, likelihoods by the
target alone.

lm-eval finds models by a table of its own or once they are registered; it reads no entry points. `register` puts the
name "dropmatch" into its registry, which is what `dropmatch lm-eval` does before it hands over. Docs: docs/lm-eval.md.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

import torch

from dropmatch.api import Decoder, DraftWeights, load
from dropmatch.config import Heads, PDrop, SamplingParams
from dropmatch.core.acceptance import RuleOptions
from dropmatch.core.engine import Chunk
from dropmatch.core.stats import EngineStats, RequestStats
from dropmatch.errors import ConfigError, UnknownNameError
from dropmatch.hf.loading import hide_progress_bars
from dropmatch.hf.model import HFModel

try:
    from lm_eval import utils as harness
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import model_registry
    from lm_eval.models.utils import normalize_gen_kwargs, resolve_max_length
    from tqdm import tqdm
except ImportError as error:
    raise ConfigError(
        f"lm-evaluation-harness is not installed, or not whole ({error}). Run: pip install 'dropmatch[eval]'."
    ) from error

MODEL_NAME = "dropmatch"
_AUTO_BATCH = 32
logger = logging.getLogger(__name__)

_HARNESS_DEVICE = "cuda:0"
_FROM_HARNESS = ("batch_size", "max_batch_size", "device")  # options of lm-eval itself, which it passes on
_SAMPLING = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}  # with what they are when off
_GENERATION = ("until", "stop", "max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens", "do_sample",
               "temperature", *_SAMPLING, "repetition_penalty", "min_new_tokens", "num_beams")  # fmt: skip

_log = logging.getLogger(__name__)


def register() -> None:
    """Make "dropmatch" a model name of lm-eval, for this process. Doing so twice is allowed."""
    import lm_eval.models  # noqa: F401  # fills the registry: lm-eval itself does so only while it is empty

    if MODEL_NAME not in model_registry:
        model_registry.register(MODEL_NAME, target=DropMatchLM)


@dataclass(frozen=True, slots=True)
class _Task:
    """A generate_until request, read. index: its place in the call; sample: how many equal requests came before it."""

    index: int
    context: str
    ids: list[int]
    params: SamplingParams
    sample: int


@dataclass(slots=True)
class _Flight:
    """A request in the engine. seconds: its share of the rounds so far."""

    task: _Task
    chunks: list[Chunk] = field(default_factory=list)
    seconds: float = 0.0


class DropMatchLM(TemplateLM):  # type: ignore[misc]  # lm-eval is looked at by no type checker
    """A `Decoder` as lm-eval wants it. `create_from_arg_obj` loads one from model_args; pass a `Decoder` in Python."""

    def __init__(
        self,
        decoder: Decoder,
        *,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        add_bos_token: bool | None = None,
        chat_template_args: Mapping[str, Any] | None = None,
        stats_file: str | Path | None = None,
        described: Mapping[str, Any] | None = None,
    ) -> None:
        """batch_size: rows decoded together; "auto" takes max_batch_size, or 32. max_length: most tokens of a row; None
        takes the target's own number. max_gen_toks: for tasks that name no limit. add_bos_token: None does as the
        tokenizer does. chat_template_args: for the template, such as {"enable_thinking": False}. stats_file: a new
        file that gets one JSON object a generated answer. described: settings, for lm-eval's results file.

        Raises ConfigError."""
        super().__init__()
        self.decoder = decoder
        self.tokenizer = decoder.tokenizer
        self.batch_size = _batch_size(batch_size, max_batch_size)
        self.max_gen_toks = _count("max_gen_toks", max_gen_toks)
        self.max_length = _max_length(decoder, max_length)
        self.add_bos_token = add_bos_token
        if chat_template_args is not None and not isinstance(chat_template_args, Mapping):
            raise ConfigError(f"chat_template_args={chat_template_args!r} is not allowed. Give a JSON object.")
        self.chat_template_args = dict(chat_template_args or {})
        self.stats = EngineStats()
        self._device = decoder.target.device
        self._described = dict(described or {})
        self._stats_path = None if stats_file is None else _free(Path(str(stats_file)))
        self._stats_file: TextIO | None = None  # opened by the first answer, so that a run that fails leaves none

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: Mapping[str, Any], additional_config: Mapping[str, Any] | None = None
    ) -> DropMatchLM:
        """What lm-eval calls: load the models that model_args names. additional_config: lm-eval's own options."""
        given = {name: value for name, value in (additional_config or {}).items() if value is not None}
        if given.get("device") == _HARNESS_DEVICE and not torch.cuda.is_available():
            # what lm-eval asks for where nobody named a device; its own models do the same
            logger.warning("There is no %s here: the models run on the CPU.", _HARNESS_DEVICE)
            given["device"] = "cpu"
        twice = next((name for name in given if name in arg_dict), None)
        if twice is not None:
            raise ConfigError(f"{twice} stands in model_args, and lm-eval has an option for it. Give --{twice} alone.")
        if "pretrained" in arg_dict:
            raise ConfigError(
                "model_args has 'pretrained'. For dropmatch the model is named target=..., with draft=...."
            )
        allowed = list(inspect.signature(load_lm).parameters)
        unknown = next((name for name in arg_dict if name not in allowed), None)
        if unknown is not None:
            raise UnknownNameError("model argument", unknown, [name for name in allowed if name not in _FROM_HARNESS])
        return load_lm(**arg_dict, **given)

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: Mapping[str, Any] | None = None) -> DropMatchLM:
        """The same from "target=...,draft=..."."""
        return cls.create_from_arg_obj(harness.simple_parse_args_string(arg_string), additional_config)

    # -- tokens and templates ---------------------------------------------------------------------------------------

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        if self.tokenizer.eos_token_id is None:
            raise ConfigError("This tokenizer has no end-of-sequence token, which lm-eval needs. Give it one.")
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """What stands in front of a text that is scored without any context."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else int(bos)

    @property
    def tokenizer_name(self) -> str:
        """Names tokenizer and template arguments, for lm-eval's cache of requests."""
        name = str(self.tokenizer.name_or_path).replace("/", "__")
        if not self.chat_template_args:
            return name
        arguments = json.dumps(self.chat_template_args, sort_keys=True)
        return f"{name}-{hashlib.sha256(arguments.encode()).hexdigest()[:8]}"

    def tok_encode(self, string: str, add_special_tokens: bool | None = None) -> list[int]:
        """Token ids. A text that begins with the BOS token, as templates write it, gets no second one."""
        bos = self.tokenizer.bos_token
        add = self.add_bos_token if add_special_tokens is None else add_special_tokens
        if add_special_tokens is None and bos is not None and string.startswith(bos):
            add = False
        options = {} if add is None else {"add_special_tokens": add}
        return list(self.tokenizer.encode(string, **options))

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The conversation as the model's template writes it. Without generation prompt the last message is one of the
        assistant's that goes on. Raises ConfigError if there is no template, or it refuses the messages."""
        if self.tokenizer.chat_template is None:
            raise ConfigError("This tokenizer has no chat template. Leave --apply_chat_template out.")
        from jinja2 import TemplateError

        try:
            return str(
                self.tokenizer.apply_chat_template(
                    chat_history,
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=not add_generation_prompt,
                    **self.chat_template_args,
                )
            )
        except TemplateError as error:
            roles = ", ".join(message["role"] for message in chat_history)
            raise ConfigError(
                f"The chat template refuses messages of the roles {roles}: {error}. Some templates take no system "
                "message: leave --system_instruction out."
            ) from error

    # -- generation -------------------------------------------------------------------------------------------------

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Answers in the order of the requests, each cut in front of its first stop string."""
        tasks = self._tasks([request.args for request in requests])
        engine = self.decoder.engine(config=replace(self.decoder.config, max_batch=self.batch_size))
        # stop strings may be, or hold, special tokens, which are no part of the answer's text
        engine.decode = lambda ids: self.tokenizer.decode(ids, skip_special_tokens=False)
        flights = {engine.add(task.ids, task.params): _Flight(task) for task in tasks}
        answers = [""] * len(requests)
        try:
            with tqdm(total=len(tasks), disable=disable_tqdm, desc="dropmatch generate_until") as progress:
                while engine.has_work:
                    started = time.perf_counter()
                    chunks = engine.step()
                    share = (time.perf_counter() - started) / max(1, len(chunks))
                    for chunk in chunks:
                        flight = flights[chunk.request]
                        flight.chunks.append(chunk)
                        flight.seconds += share
                        if chunk.stats is not None:
                            index = flight.task.index
                            answers[index] = self._finish(flight, chunk.stats, requests[index])
                            progress.update()
        finally:
            self.stats.add(engine.stats)
        return answers

    def _finish(self, flight: _Flight, stats: RequestStats, request: Any) -> str:
        """The answer's text, which is kept in lm-eval's cache and noted in the side file."""
        tokens = [token for chunk in flight.chunks for token in chunk.tokens]
        text = cut(self.tokenizer.decode(tokens, skip_special_tokens=True), flight.task.params.stop)
        self.cache_hook.add_partial("generate_until", request.args, text)
        if self._stats_path is not None:
            entry = {
                "task": request.task_name,
                "doc_id": request.doc_id,
                "sample": flight.task.sample,
                "steps": stats.rounds,
                "drafted": stats.drafted,
                "accepted": stats.accepted,
                "emitted": stats.emitted,
                "lossy": len(stats.lossy),
                "seconds": flight.seconds,
                "finish": flight.chunks[-1].finish_reason,
                "reasons": {reason.label: count for reason, count in sorted(stats.reasons.items())},
            }
            if self._stats_file is None:
                self._stats_path.parent.mkdir(parents=True, exist_ok=True)
                self._stats_file = self._stats_path.open("x", encoding="utf-8")
            self._stats_file.write(json.dumps(entry) + "\n")
            self._stats_file.flush()
        return text

    def _tasks(self, arguments: Iterable[tuple[str, Mapping[str, Any]]]) -> list[_Task]:
        tasks: list[_Task] = []
        seen: dict[tuple[str, str], int] = {}
        eos_ids = tuple(sorted(self.decoder.eos_ids | {self.eot_token_id}))
        for index, (context, options) in enumerate(arguments):
            key = (context, json.dumps(options, sort_keys=True, default=str))
            sample = seen[key] = seen.get(key, -1) + 1
            params = sampling_params(options, self.max_gen_toks)
            params = replace(params, eos_ids=eos_ids, seed=self.decoder.config.seed)
            if params.temperature > 0:  # a request that is repeated wants another sample each time
                params = replace(params, stream=sample)
            tasks.append(_Task(index, context, self._prompt(context, params.max_new_tokens), params, sample))
        return tasks

    def _prompt(self, context: str, max_new_tokens: int) -> list[int]:
        """Token ids with room for the answer behind them; what is too much is cut from the left, with a warning."""
        room = self.max_length - max_new_tokens
        if room < 1:
            raise ConfigError(
                f"max_gen_toks={max_new_tokens} leaves no room for a prompt among the {self.max_length} positions of "
                "the models. Ask for fewer with --gen_kwargs max_gen_toks=N."
            )
        ids = self.tok_encode(context) or [self.prefix_token_id]
        if len(ids) > room:
            _log.warning("A prompt of %d tokens is cut from the left to the last %d.", len(ids), room)
        return ids[-room:]

    # -- likelihoods ------------------------------------------------------------------------------------------------

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihoods of whole texts, long ones in windows of max_length, each token predicted once."""
        windows: list[tuple[None, list[int], list[int]]] = []
        owners: list[int] = []
        for owner, request in enumerate(requests):
            pairs = harness.get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for context, continuation in map(harness.make_disjoint_window, pairs):
                windows.append((None, context, continuation))
                owners.append(owner)
        totals = [0.0] * len(requests)
        for owner, (value, _) in zip(owners, self._loglikelihood_tokens(windows, disable_tqdm), strict=True):
            totals[owner] += value
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
    ) -> list[tuple[float, bool]]:
        """(log-likelihood, whether greedy decoding would write it) of each continuation, by the undropped target.

        requests: (texts or None, context ids, continuation ids). Continuations of one context that differ in the last
        token only, as the letters of a multiple choice do, share a forward."""
        by_row: dict[tuple[int, ...], list[int]] = {}
        for index, (_, context, continuation) in enumerate(requests):
            by_row.setdefault(self._row(context, continuation), []).append(index)
        rows = sorted(by_row, key=len, reverse=True)  # rows of about one length waste little padding
        answers: list[tuple[float, bool] | None] = [None] * len(requests)
        with tqdm(total=len(requests), disable=disable_tqdm, desc="dropmatch loglikelihood") as progress:
            for start in range(0, len(rows), self.batch_size):
                batch = rows[start : start + self.batch_size]
                wanted = [[requests[index][2] for index in by_row[row]] for row in batch]
                for row, values in zip(batch, score_rows(self.decoder.target, batch, wanted), strict=True):
                    for index, value in zip(by_row[row], values, strict=True):
                        answers[index] = value
                        texts = requests[index][0]
                        if texts is not None:
                            self.cache_hook.add_partial("loglikelihood", texts, value)
                        progress.update()
        return [answer for answer in answers if answer is not None]

    def _row(self, context: list[int], continuation: list[int]) -> tuple[int, ...]:
        """What the target reads: all but the last token, cut from the left to max_length."""
        if not continuation or len(continuation) > self.max_length:
            raise ConfigError(
                f"A continuation of {len(continuation)} tokens cannot be scored: between 1 and {self.max_length} fit."
            )
        whole = context + continuation
        if len(whole) > self.max_length + 1:
            _log.warning("A context of %d tokens is cut from the left to fit %d.", len(context), self.max_length)
        return tuple(whole[-(self.max_length + 1) :][:-1])

    # -- results ----------------------------------------------------------------------------------------------------

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval writes beside its results: settings, and the statistics of all that was generated."""
        target = self.decoder.target
        pooled = {key: value for key, value in self.stats.to_json().items() if key != "lossy"}
        return {
            "model_num_parameters": sum(parameter.numel() for parameter in target.model.parameters()),
            "model_dtype": str(target.dtype).removeprefix("torch."),
            "dropmatch": {
                **self._described,
                "num_paths": self.decoder.dropout.num_paths,
                "p_drop": self.decoder.dropout.p_drop,
                "draft_length": self.decoder.config.draft_length,
                "max_length": self.max_length,
                "batch_size": self.batch_size,
                "statistics": pooled if self.stats.requests.rounds else None,
            },
        }


def load_lm(
    target: str = "default",
    draft: str | None = None,
    rule: str = "dropmatch",
    k: int = 5,
    p_drop: PDrop | None = None,
    heads: Heads = "shortlist",
    guard_prob: float = 0.0,
    guard_ratio: float = 0.0,
    draft_length: int = 5,
    draft_weights: DraftWeights = "own",
    min_confidence: float = 0.0,
    dtype: str = "auto",
    seed: int = 0,
    max_length: int | None = None,
    max_gen_toks: int = 256,
    add_bos_token: bool | None = None,
    chat_template_args: Mapping[str, Any] | None = None,
    stats_file: str | None = None,
    batch_size: int | str = 1,
    max_batch_size: int | None = None,
    device: str = "auto",
) -> DropMatchLM:
    """The model that `--model dropmatch` makes; the arguments are its model_args, and lm-eval's own last three.

    target to seed: as for `dropmatch.load`, where k is called num_paths, and its rule options. The others: as for
    `DropMatchLM`. Raises what both raise."""
    hide_progress_bars()
    decoder = load(
        str(target),
        None if draft is None else str(draft),
        rule=rule,
        rule_options=RuleOptions(guard_prob=guard_prob, guard_ratio=guard_ratio),
        num_paths=k,
        p_drop=p_drop,
        heads=heads,
        draft_length=draft_length,
        draft_weights=draft_weights,
        min_confidence=min_confidence,
        dtype=dtype,
        device=device,
        seed=seed,
    )
    described = {
        "target": str(target),
        "draft": draft,
        "rule": rule,
        "heads": heads,
        "guard_prob": guard_prob,
        "guard_ratio": guard_ratio,
        "draft_weights": draft_weights,
        "min_confidence": min_confidence,
        "seed": seed,
    }
    return DropMatchLM(
        decoder,
        batch_size=batch_size,
        max_batch_size=max_batch_size,
        max_length=max_length,
        max_gen_toks=max_gen_toks,
        add_bos_token=add_bos_token,
        chat_template_args=chat_template_args,
        stats_file=stats_file,
        described=described,
    )


def sampling_params(options: Mapping[str, Any], max_gen_toks: int) -> SamplingParams:
    """A task's generation_kwargs as ours. max_gen_toks: where they name none. Raises ConfigError for what the engine
    cannot do, such as beam search."""
    unknown = next((name for name in options if name not in _GENERATION), None)
    if unknown is not None:
        raise UnknownNameError("generation argument", unknown, _GENERATION)
    if options.get("num_beams", 1) != 1:
        raise ConfigError(f"num_beams={options['num_beams']!r} is not allowed: the engine does no beam search.")
    if not isinstance(options.get("do_sample"), bool | None):
        raise ConfigError(f"do_sample={options['do_sample']!r} is not allowed. Give true or false, without quotes.")
    known = normalize_gen_kwargs(dict(options), max_gen_toks)
    is_sampled = bool(known["do_sample"])
    temperature = float(known.get("temperature", 1.0)) if is_sampled else 0.0
    if is_sampled and temperature == 0.0:
        raise ConfigError("do_sample=True goes with a temperature above 0, and it is 0. Change one of them.")
    return SamplingParams(
        max_new_tokens=known["max_gen_toks"],
        min_new_tokens=int(options.get("min_new_tokens", 0)),
        temperature=temperature,
        top_k=int(options.get("top_k", 0)) if is_sampled else 0,
        top_p=float(options.get("top_p", 1.0)) if is_sampled else 1.0,
        min_p=float(options.get("min_p", 0.0)) if is_sampled else 0.0,
        repetition_penalty=float(options.get("repetition_penalty", 1.0)),
        stop=tuple(text for text in (*_strings("until", options), *_strings("stop", options)) if text),
    )


def cut(text: str, stop: Sequence[str]) -> str:
    """The text in front of the first stop string."""
    return text[: min((at for s in stop if (at := text.find(s)) >= 0), default=len(text))]


@torch.inference_mode()
def score_rows(
    target: HFModel, rows: Sequence[Sequence[int]], continuations: Sequence[Sequence[Sequence[int]]]
) -> list[list[tuple[float, bool]]]:
    """Log-likelihoods of continuations, and whether each token of one is the target's best.

    rows: token ids that the target reads. continuations[b]: ids whose last one follows rows[b], the others being its
    end. Only the places of the continuations pass the LM head, in float32."""
    model = HFModel(target.model, probe=False)  # a cache of its own
    hidden = model.add_rows(rows).hidden  # [B, S, d]
    scores = []
    for b, (row, wanted) in enumerate(zip(rows, continuations, strict=True)):
        longest = max(map(len, wanted))
        logits = model.head(hidden[b, len(row) - longest : len(row)]).float()  # [T, V]
        logprobs, best = logits.log_softmax(-1), logits.argmax(-1)
        values = []
        for ids in wanted:
            tokens = torch.tensor(ids, device=logits.device)
            picked = logprobs[-len(ids) :].gather(-1, tokens[:, None])
            values.append((float(picked.sum()), bool((best[-len(ids) :] == tokens).all())))
        scores.append(values)
    return scores


def _strings(name: str, options: Mapping[str, Any]) -> list[str]:
    value = options.get(name) or []
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        raise ConfigError(f"{name}={value!r} is not allowed. Give a string or a list of strings.")
    return list(texts)


def _batch_size(batch_size: int | str, max_batch_size: int | None) -> int:
    if str(batch_size).partition(":")[0] == "auto":
        return _count("max_batch_size", _AUTO_BATCH if max_batch_size is None else max_batch_size)
    return _count("batch_size", batch_size)


def _count(name: str, value: object) -> int:
    if isinstance(value, bool) or not str(value).isdecimal() or int(str(value)) < 1:
        extra = " or 'auto'" if name == "batch_size" else ""
        raise ConfigError(f"{name}={value!r} is not allowed. Give a whole number of at least 1{extra}.")
    return int(str(value))


def _max_length(decoder: Decoder, asked: int | None) -> int:
    """Most tokens of a row: what the target was made for, unless asked otherwise, and no more than the models hold."""
    held = decoder.config.max_length
    if asked is None:
        known = int(resolve_max_length(decoder.target.model.config, decoder.tokenizer))
        return known if held is None else min(known, held)
    if held is not None and _count("max_length", asked) > held:
        raise ConfigError(f"max_length={asked} is more than the models hold. Allowed: up to {held}.")
    return _count("max_length", asked)


def _free(path: Path) -> Path:
    if path.exists():
        raise ConfigError(f"stats_file={str(path)!r} is there already. Remove it or name another file.")
    return path
