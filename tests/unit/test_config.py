"""Settings refuse what they cannot use, and say what is allowed."""

from __future__ import annotations

import dataclasses

import pytest

from dropmatch import errors
from dropmatch.config import DropoutConfig, EngineConfig, SamplingParams
from dropmatch.errors import ConfigError, DropMatchError, UnknownNameError


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DropoutConfig(num_paths=0), r"num_paths=0 .*whole number of at least 1"),
        (lambda: DropoutConfig(num_paths=2.5), r"num_paths=2.5"),
        (lambda: DropoutConfig(num_paths=True), r"num_paths=True"),
        (lambda: DropoutConfig(p_drop=1.0), r"p_drop=1.0 is out of range. Allowed: \[0.0, 1.0\)"),
        (lambda: DropoutConfig(p_drop=-0.1), r"p_drop=-0.1"),
        (lambda: DropoutConfig(p_drop=float("nan")), r"p_drop=nan"),
        (lambda: DropoutConfig(p_drop="aut"), r"Unknown p_drop 'aut'. Did you mean 'auto'"),
        (lambda: DropoutConfig(mask_sharing="positon"), r"Did you mean 'position'"),
        (lambda: DropoutConfig(noise="none"), r"Unknown noise 'none'.* Available: independent, shared"),
        (lambda: SamplingParams(max_new_tokens=0), r"max_new_tokens=0"),
        (lambda: SamplingParams(min_new_tokens=-1), r"min_new_tokens=-1"),
        (lambda: SamplingParams(temperature=-1.0), r"temperature=-1.0"),
        (lambda: SamplingParams(temperature=float("nan")), r"temperature=nan"),
        (lambda: SamplingParams(top_k=-1), r"top_k=-1"),
        (lambda: SamplingParams(top_p=1.5), r"top_p=1.5"),
        (lambda: SamplingParams(min_p=-0.5), r"min_p=-0.5"),
        (lambda: SamplingParams(repetition_penalty=0.0), r"repetition_penalty=0.0 .*positive"),
        (lambda: SamplingParams(repetition_penalty=float("nan")), r"repetition_penalty=nan"),
        (lambda: SamplingParams(draft_length=-1), r"draft_length=-1"),
        (lambda: SamplingParams(seed=-1), r"seed=-1"),
        (lambda: SamplingParams(seed=2**63), r"seed=9223372036854775808"),
        (lambda: SamplingParams(stream=-1), r"stream=-1"),
        (lambda: SamplingParams(stop="word"), r"Give a tuple of strings"),
        (lambda: SamplingParams(stop=("",)), r"not empty"),
        (lambda: EngineConfig(draft_length=-1), r"draft_length=-1"),
        (lambda: EngineConfig(max_batch=0), r"max_batch=0"),
        (lambda: EngineConfig(correction="plane"), r"Did you mean 'plain'"),
        (lambda: EngineConfig(seed=-1), r"seed=-1"),
        (lambda: EngineConfig(max_length=1), r"max_length=1"),
    ],
)
def test_bad_values_are_refused_with_what_is_allowed(make: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize("config", [DropoutConfig(), SamplingParams(), EngineConfig()])
def test_settings_are_frozen(config: object) -> None:
    name = dataclasses.fields(config)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(config, name, 1)


def test_defaults_are_the_papers() -> None:
    assert DropoutConfig() == DropoutConfig(num_paths=5, p_drop=0.3, mask_sharing="position", noise="shared")
    assert EngineConfig().correction == "plain"
    assert not EngineConfig().protect_eos
    assert SamplingParams().temperature == 0.0


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (SamplingParams(), False),
        (SamplingParams(temperature=1.0, top_p=0.5), False),
        (SamplingParams(suppress_tokens=(1,)), True),
        (SamplingParams(min_new_tokens=1), True),
        (SamplingParams(repetition_penalty=1.1), True),
        (SamplingParams(processors=(lambda ids, logits: logits,)), True),
    ],
)
def test_processing_is_needed_where_logits_change_before_the_argmax(params: SamplingParams, expected: bool) -> None:
    assert params.needs_processing is expected


def test_warping_is_needed_only_when_sampling_is_restricted() -> None:
    assert SamplingParams(temperature=0.5, top_k=3).needs_warping
    assert SamplingParams(temperature=0.5, min_p=0.1).needs_warping
    assert not SamplingParams(temperature=0.5).needs_warping
    assert not SamplingParams(temperature=0.0, top_k=3).needs_warping


def test_errors_are_one_family() -> None:
    family = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)]
    assert len(family) >= 9
    assert all(issubclass(error, DropMatchError) for error in family)
    assert issubclass(ConfigError, ValueError)


def test_unknown_name_without_a_near_match_lists_all() -> None:
    assert str(UnknownNameError("thing", "zzz", ("b", "a"))) == "Unknown thing 'zzz'. Available: a, b."
