"""`vllm serve` with the plugin, driven by the openai client: streams, fields, bad requests, metrics, many clients."""

from __future__ import annotations

import asyncio
import json
import random
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import openai
import pytest

from engines import environment

START = 300  # seconds until the server answers
LOAD = 240  # seconds for all clients of the load test, on two busy cores
CLIENTS = 32
PROMPT = "the harbour was quiet when"


@pytest.fixture(scope="module")
def server(pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a running server."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "log.txt"
    command = [
        str(Path(sys.executable).parent / "vllm"),
        "serve",
        str(pair[0]),
        "--served-model-name=tiny",
        f"--port={port}",
        "--host=127.0.0.1",
        "--enforce-eager",
        "--max-model-len=256",
        "--max-num-seqs=8",
        "--dtype=float32",
        "--speculative-config",
        json.dumps({"model": str(pair[1]), "num_speculative_tokens": 4}),
        "--additional-config",
        json.dumps({"dropmatch": {"rule": "dropmatch", "k": 5, "p_drop": 0.1}}),
    ]
    with log.open("w") as output:
        process = subprocess.Popen(command, env=environment(), stdout=output, stderr=subprocess.STDOUT)
        try:
            _wait(f"http://127.0.0.1:{port}/health", process, log)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(60)


def _wait(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + START
    while time.monotonic() < end:
        if process.poll() is not None:
            pytest.fail(f"the server ended: {log.read_text()[-4000:]}")
        try:
            with urlopen(address, timeout=2):
                return
        except OSError:
            time.sleep(0.5)
    pytest.fail(f"the server did not start in {START} s: {log.read_text()[-4000:]}")


@pytest.fixture(scope="module")
def client(server: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0, timeout=120)


def _metrics(server: str) -> dict[str, float]:
    """Sums over labels, but for the reason."""
    with urlopen(f"{server}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    found: dict[str, float] = {}
    for name, labels, value in re.findall(r"^vllm:(\w+_total)\{(.*?)\} (\S+)$", text, flags=re.MULTILINE):
        reason = re.search(r'reason="(\w+)"', labels)
        key = f"{name}/{reason.group(1)}" if reason else name
        found[key] = found.get(key, 0.0) + float(value)
    return found


def _text(client: openai.OpenAI, **fields: object) -> str:
    answer = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=40, temperature=0, extra_body={"ignore_eos": True, "vllm_xargs": fields}
    )
    return answer.choices[0].text


def test_a_stream_is_the_whole_answer_in_pieces(client: openai.OpenAI) -> None:
    whole = _text(client)
    stream = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=40, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )
    pieces = [chunk.choices[0].text for chunk in stream]
    assert "".join(pieces) == whole
    assert len(pieces) > 1


def test_fields_of_a_request_change_its_rule(client: openai.OpenAI) -> None:
    lossless = _text(client, dropmatch_rule="lossless")
    assert _text(client, dropmatch_off=1) == lossless
    assert _text(client, dropmatch_p_drop=0.0) == lossless
    assert _text(client, dropmatch_rule="dropmatch-naive", dropmatch_p_drop=0.3, dropmatch_k=8) != lossless


def test_chat_with_logprobs_and_samples(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": PROMPT}],
        max_tokens=12,
        temperature=0.9,
        seed=3,
        n=2,
        logprobs=True,
        top_logprobs=2,
        stop=["zzz"],
    )
    assert len(answer.choices) == 2
    for choice in answer.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.content
        assert all(entry.logprob <= 0 for entry in choice.logprobs.content)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"dropmatch_rule": "dropmach"}, "Did you mean 'dropmatch'"),
        ({"dropmatch_rule": 3}, "dropmatch_rule"),
        ({"dropmatch_p_drop": 2}, "dropmatch_p_drop"),
        ({"dropmatch_k": "five"}, "dropmatch_k"),
        ({"dropmatch_guard": 1.5}, "dropmatch_guard"),
        ({"dropmatch_off": "perhaps"}, "dropmatch_off"),
        ({"dropmatch_ruel": "exact"}, "dropmatch_rule"),
    ],
)
def test_a_bad_field_is_a_bad_request_that_names_it(
    client: openai.OpenAI, fields: dict[str, object], says: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        _text(client, **fields)
    assert refused.value.status_code == 400
    assert says in str(refused.value)


def test_a_bad_stream_is_refused_before_it_begins(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": PROMPT}]
    with pytest.raises(openai.BadRequestError, match="dropmatch_k=0"):
        client.chat.completions.create(
            model="tiny", messages=messages, stream=True, extra_body={"vllm_xargs": {"dropmatch_k": 0}}
        )


def test_counters_stand_beside_the_stock_ones(client: openai.OpenAI, server: str) -> None:
    before = _metrics(server)
    _text(client)
    after = _metrics(server)
    grown = {name: after[name] - before.get(name, 0.0) for name in after}
    kept = {name: value for name, value in grown.items() if name.startswith("dropmatch_kept_tokens")}
    assert grown["dropmatch_drafted_tokens_total"] == grown["spec_decode_num_draft_tokens_total"] > 0
    assert sum(kept.values()) == grown["spec_decode_num_accepted_tokens_total"] > 0
    assert grown["dropmatch_lossy_tokens_total"] <= sum(kept.values())


async def _visit(client: openai.AsyncOpenAI, number: int) -> str:
    """One client: most read a stream to its end, some leave early, some ask badly."""
    kind = ("reads", "reads", "leaves", "asks badly")[number % 4]
    fields: dict[str, object] = {"dropmatch_rule": random.Random(number).choice(["dropmatch", "head", "exact"])}
    if kind == "asks badly":
        fields = {"dropmatch_k": -number}
    try:
        stream = await client.completions.create(
            model="tiny",
            prompt=f"{PROMPT} {number}",
            max_tokens=60,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True, "vllm_xargs": fields},
        )
    except openai.BadRequestError:
        return "refused"
    seen, finish = 0, None
    async for chunk in stream:
        seen += 1
        if kind == "leaves" and seen == 2:
            await stream.close()
            return "left"
        finish = chunk.choices[0].finish_reason
    return str(finish)


def test_many_clients_of_whom_some_leave_and_some_ask_badly(client: openai.OpenAI, server: str) -> None:
    before = _text(client)

    async def all_clients() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0, timeout=LOAD) as many:
            return await asyncio.wait_for(asyncio.gather(*(_visit(many, i) for i in range(CLIENTS))), LOAD)

    ends = asyncio.run(all_clients())
    assert {end: ends.count(end) for end in set(ends)} == {
        "length": CLIENTS // 2,
        "left": CLIENTS // 4,
        "refused": CLIENTS // 4,
    }
    assert _text(client) == before
    with urlopen(f"{server}/health", timeout=10) as answer:
        assert answer.status == 200
