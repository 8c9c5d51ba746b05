"""`vllm serve` with the plugin, driven by the openai client: streams, fields, bad requests, metrics, many clients."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import openai
import pytest

from engines import environment

START = 300  # seconds until the server answers
LOAD = 240  # seconds for all clients of the load test, on two busy cores
CLIENTS = 32
PROMPT = "the harbour was quiet when"


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the server says."""
    return tmp_path_factory.mktemp("server") / "log.txt"


@pytest.fixture(scope="module")
def server(pair: tuple[Path, Path], log: Path) -> Iterator[str]:
    """The address of a running server."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
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
    """Counters and gauges, summed over labels but for the reason."""
    with urlopen(f"{server}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    found: dict[str, float] = {}
    for name, labels, value in re.findall(
        r"^vllm:(\w+_total|num_requests_\w+)\{(.*?)\} (\S+)$", text, flags=re.MULTILINE
    ):
        reason = re.search(r'(?:^|,)reason="(\w+)"', labels)
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


def test_a_schema_holds_for_lossy_answers(client: openai.OpenAI) -> None:
    colours = {"type": "object", "properties": {"c": {"enum": ["red", "green", "blue"]}}, "required": ["c"]}
    answer = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": PROMPT}],
        max_tokens=60,
        temperature=0,
        response_format={"type": "json_schema", "json_schema": {"name": "colour", "schema": colours}},
        extra_body={"vllm_xargs": {"dropmatch_p_drop": 0.3}},
    )
    assert json.loads(answer.choices[0].message.content or "")["c"] in {"red", "green", "blue"}


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("dropmatch_rule", "dropmach", "Did you mean 'dropmatch'"),
        ("dropmatch_rule", 3, "dropmatch_rule=3"),
        ("dropmatch_rule", "typical(eps=0.1)", "Available: dropmatch, dropmatch-expected"),
        ("dropmatch_p_drop", 2, "in [0, 1)"),
        ("dropmatch_k", "five", "at least 1"),
        ("dropmatch_k", 60_000, "memory_mb"),
        ("dropmatch_guard", 1.5, "in [0, 1]"),
        ("dropmatch_off", "perhaps", "true or false"),
        ("dropmatch_ruel", "exact", "Did you mean 'dropmatch_rule'"),
    ],
)
def test_a_bad_field_is_a_bad_request_that_names_it(
    client: openai.OpenAI, field: str, value: object, says: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        _text(client, **{field: value})
    assert refused.value.status_code == 400
    assert refused.value.param == "vllm_xargs"
    assert field in str(refused.value)
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


KINDS = ("reads", "reads", "leaves", "asks badly")  # of clients, in turn
RULES = ("dropmatch", "head", "exact+majority", "lossless")


def _asks(number: int) -> dict[str, Any]:
    """What one client asks for: a prompt, a rule and a length of its own."""
    return {
        "model": "tiny",
        "prompt": f"{number} {PROMPT}",
        "max_tokens": 40 + number,
        "temperature": 0,
        "extra_body": {"ignore_eos": True, "vllm_xargs": {"dropmatch_rule": RULES[number // 4 % 4]}},
    }


async def _visit(client: openai.AsyncOpenAI, number: int) -> tuple[str, str]:
    """One client: most read a stream to its end, some leave early, some ask badly. Returns its end and its text."""
    kind, asks = KINDS[number % 4], _asks(number)
    if kind == "asks badly":
        asks["extra_body"]["vllm_xargs"] = {"dropmatch_k": -number}
    try:
        stream = await client.completions.create(**asks, stream=True)
    except openai.BadRequestError as error:
        return "refused", str(error)
    text, finish = "", None
    async for chunk in stream:
        text += chunk.choices[0].text
        finish = chunk.choices[0].finish_reason
        if kind == "leaves" and len(text) > 5:
            await stream.close()
            return "left", text
    return str(finish), text


def test_many_clients_of_whom_some_leave_and_some_ask_badly(client: openai.OpenAI, server: str, log: Path) -> None:
    """Nobody is lost, nobody gets another's text, and nothing but the bad requests goes wrong."""
    before, said = _metrics(server), len(log.read_text())

    async def all_clients() -> list[tuple[str, str]]:
        async with openai.AsyncOpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0, timeout=LOAD) as many:
            return await asyncio.wait_for(asyncio.gather(*(_visit(many, i) for i in range(CLIENTS))), LOAD)

    ends = asyncio.run(all_clients())
    wanted = {"reads": "length", "leaves": "left", "asks badly": "refused"}
    assert [end for end, _ in ends] == [wanted[KINDS[i % 4]] for i in range(CLIENTS)]
    after = _settled(server)
    finished = after["request_success_total"] - before["request_success_total"]
    assert CLIENTS // 2 <= finished <= CLIENTS * 3 // 4  # one who leaves may be done already
    for number, (end, text) in enumerate(ends):
        if end == "refused":
            assert f"dropmatch_k={-number}" in text
            continue
        alone = client.completions.create(**_asks(number)).choices[0].text
        assert text == alone if end == "length" else alone.startswith(text)
    assert len({text for end, text in ends if end == "length"}) == CLIENTS // 2
    assert "Traceback" not in log.read_text()[said:]


def _settled(server: str) -> dict[str, float]:
    """The metrics once no request is left, which those that were left behind may take a moment to be."""
    for _ in range(60):
        metrics = _metrics(server)
        if metrics["num_requests_running"] == metrics["num_requests_waiting"] == 0.0:
            return metrics
        time.sleep(0.5)
    pytest.fail(f"requests are left: {metrics}")
