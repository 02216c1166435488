"""A package that two ranks share is served as one of a single process is: same tokens, streams, signals. A rank that
dies ends the server, which says so."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from safetensors.torch import save_file

from mgraph.codegen.buckets import read_histogram
from mgraph.compiler import compile_package
from mgraph.recipe import Recipe
from mgraph.runtime.handshake import MeshError
from mgraph.runtime.serving.llm import LLM
from mgraph.runtime.serving.parameters import SamplingParams
from tests.end_to_end.builds import Build, build

ROOT = Path(__file__).parents[2]
PROMPTS = ["The cat", "a", "Once upon a time there was a ", "The cat sat"]


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A package of a tiny model, with a window in one layer, for one process (`1`), one for two ranks (`2`), and
    `weights` that are spread out."""
    found: dict[str, Path] = {}
    for count in (1, 2):
        built = package(tmp_path_factory.mktemp(f"ranks{count}"), count)
        found[str(count)] = built.path
    torch.manual_seed(0)
    model = built.eager().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.15)
    found["weights"] = tmp_path_factory.mktemp("weights") / "model.safetensors"
    save_file({n: p.detach().clone() for n, p in model.named_parameters()}, found["weights"])
    return found


def package(directory: Path, ranks: int) -> Build:
    mesh = {} if ranks == 1 else {"mesh": f"tp={ranks}"}
    return build("dense-tiny-capped", directory, purpose="serve", max_length=64, **mesh)


def environment(**variables: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **variables}


@contextmanager
def ranks(command: Sequence[str], count: int = 2) -> Iterator[list[subprocess.Popen[str]]]:
    """The processes that torchrun would start, by rank."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    found = []
    for rank in range(count):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
        given = environment(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, **place)
        found.append(subprocess.Popen(command, env=given, stderr=subprocess.PIPE, text=True))
    try:
        yield found
    finally:
        for process in found:
            process.kill()
            process.wait()


def serve(package: Path, weights: Path, device: str = "cpu") -> list[str]:
    return [sys.executable, str(package / "serve.py"), "--weights", str(weights), "--port", "0", "--device", device]


def address_of(process: subprocess.Popen[str]) -> str:
    """Where rank 0 listens, as soon as it does."""
    assert process.stderr is not None
    for line in process.stderr:
        if (found := re.search(r"serving \S+ at (http://\S+)", line)) is not None:
            return found[1]
    raise AssertionError("it ended")


def alone(packages: dict[str, Path], count: int) -> list[Any]:
    """What the package of a single process gives."""
    model = LLM(packages["1"], packages["weights"], device="cpu")
    params = SamplingParams(temperature=0, max_tokens=count, logprobs=3)
    return [output.outputs[0] for output in model.generate(PROMPTS, params)]


def check_same(client: openai.OpenAI, packages: dict[str, Path]) -> None:
    """Greedy tokens, their log-probabilities and the likeliest ones are those of a single process."""
    name = client.models.list().data[0].id
    made = client.completions.create(model=name, prompt=PROMPTS, max_tokens=12, temperature=0, logprobs=3)
    for choice, expected in zip(made.choices, alone(packages, 12), strict=True):
        assert choice.text == expected.text and len(set(expected.token_ids)) > 3
        assert choice.logprobs is not None and choice.logprobs.token_logprobs is not None
        assert choice.logprobs.token_logprobs == pytest.approx([s.logprob for s in expected.logprobs], abs=1e-5)
    drawn: dict[str, Any] = {"model": name, "max_tokens": 12, "temperature": 1.0, "seed": 5, "top_p": 0.9}
    drawn |= {"frequency_penalty": 0.5, "logit_bias": {"65": -100}}
    params = SamplingParams(
        temperature=1.0, seed=5, top_p=0.9, frequency_penalty=0.5, logit_bias={65: -100}, max_tokens=12
    )
    expected = LLM(packages["1"], packages["weights"], device="cpu").generate("The cat", params)[0].outputs[0].text
    assert client.completions.create(prompt="The cat", **drawn).choices[0].text == expected
    pieces = client.completions.create(prompt="The cat", stream=True, **drawn)
    texts = [chunk.choices[0].text for chunk in pieces]
    assert "".join(texts) == expected and len(texts) > 5


def test_two_ranks_serve_what_one_does_and_drain(packages: dict[str, Path], tmp_path: Path) -> None:
    """A stream that is under way at SIGTERM is finished, and then all ranks end with 0."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = (
        launch + serve(packages["2"], packages["weights"])[1:] + ["--record-workload", str(tmp_path / "steps.json")]
    )
    with subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        first = next(line for line in process.stderr if "rank 0" in line)
        leader = re.search(r"2 ranks; process (\d+) is rank 0", first)
        assert leader is not None, first
        with openai.OpenAI(base_url=f"{address_of(process)}/v1", api_key="none", max_retries=0) as client:
            check_same(client, packages)
            name = client.models.list().data[0].id
            stream = client.completions.create(model=name, prompt="a", max_tokens=50, temperature=0, stream=True)
            pieces = [next(iter(stream)).choices[0].text]
            os.kill(int(leader[1]), signal.SIGTERM)
            pieces += [chunk.choices[0].text for chunk in stream]
        assert len(pieces) > 20
        assert process.wait(30) == 0, process.stderr.read()
    steps = read_histogram(tmp_path / "steps.json")
    assert steps[1, 1] > 50 and max(steps)[0] > 7, "prompts are among them"


def test_a_rank_that_dies_ends_the_server(packages: dict[str, Path]) -> None:
    """Started without torchrun: the one process starts the other. Requests under way are told why, also in a stream."""
    ends: list[str] = []
    with subprocess.Popen(
        serve(packages["2"], packages["weights"]), env=environment(), stderr=subprocess.PIPE, text=True
    ) as leader:
        with openai.OpenAI(base_url=f"{address_of(leader)}/v1", api_key="none", max_retries=0) as client:
            name = client.models.list().data[0].id
            asked = {"model": name, "prompt": "a", "max_tokens": 60, "temperature": 0.0}
            busy = [
                threading.Thread(target=_until_it_ends, args=(client, {**asked, "stream": stream}, ends), daemon=True)
                for stream in (True, False)
            ]
            for thread in busy:
                thread.start()
            time.sleep(0.3)
            (follower,) = children(leader.pid)
            os.kill(follower, signal.SIGTERM)  # of which followers take no notice
            time.sleep(0.3)
            assert leader.poll() is None
            begun = time.monotonic()
            os.kill(follower, signal.SIGKILL)
            assert leader.wait(30) == 1 and time.monotonic() - begun < 30
            for thread in busy:
                thread.join(10)
        # One that had just ended, and asks again while the step hangs, is cut off.
        assert len(ends) == 2 and any("rank 1 has died" in end for end in ends), ends
        assert leader.stderr is not None
        assert "error: rank 1 has died: nothing can be served without it\n" in leader.stderr.read()


def children(process: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


@pytest.mark.full
def test_one_command_starts_and_drains_all_ranks(packages: dict[str, Path]) -> None:
    """A Ctrl-C of the terminal would reach rank 0 alone; a port that is taken ends all."""
    command = serve(packages["2"], packages["weights"])
    with subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True) as leader:
        address = address_of(leader)
        (follower,) = children(leader.pid)
        with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
            name = client.models.list().data[0].id
            stream = client.completions.create(model=name, prompt="a", max_tokens=50, temperature=0, stream=True)
            pieces = [next(iter(stream)).choices[0].text]
            taken = [*command[:-4], "--port", address.rpartition(":")[2], "--device", "cpu"]
            refused = subprocess.run(taken, env=environment(), capture_output=True, text=True, timeout=60)
            leader.send_signal(signal.SIGINT)
            pieces += [chunk.choices[0].text for chunk in stream]
        assert leader.wait(30) == 0 and len(pieces) > 20 and not Path(f"/proc/{follower}").exists()
    assert refused.returncode == 2 and "cannot listen at" in refused.stderr and "Traceback" not in refused.stderr


def _until_it_ends(client: openai.OpenAI, asked: dict[str, Any], ends: list[str]) -> None:
    try:
        while True:
            made = client.completions.create(**asked)
            for _ in made if asked["stream"] else ():
                pass
    except openai.OpenAIError as error:
        ends.append(str(error))


@pytest.mark.multi_gpu
def test_two_gpus_serve_what_a_cpu_does(packages: dict[str, Path]) -> None:
    """Twice, so that steps are replayed as graphs, collectives included."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = launch + serve(packages["2"], packages["weights"], "cuda")[1:]
    with subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE, text=True
    ) as server:
        address = address_of(server)
        with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
            for _ in range(3):
                check_same(client, packages)
        metrics = urllib.request.urlopen(f"{address}/metrics").read().decode()
        graphs = re.search(r'mgraph_steps_by_launch_total{launch="graph".*} (\S+)', metrics)
        assert graphs is not None and float(graphs[1]) > 50
        server.send_signal(signal.SIGINT)


@pytest.mark.full
def test_followers_end_when_rank_0_dies(packages: dict[str, Path]) -> None:
    with ranks(serve(packages["2"], packages["weights"])) as processes:
        leader, follower = processes
        address_of(leader)
        leader.kill()
        assert follower.wait(30) == 1 and follower.stderr is not None
        assert "error: rank 0 has died" in follower.stderr.read()


@pytest.mark.full
def test_more_ranks_than_key_value_heads(packages: dict[str, Path], tmp_path: Path) -> None:
    """A program with `LLM`: it goes on on rank 0 alone. Each rank has a copy of the head that it needs."""
    script = tmp_path / "script.py"
    script.write_text(
        "import json, sys\n"
        "from mgraph import LLM, SamplingParams\n"
        "model = LLM(sys.argv[1], sys.argv[2], device='cpu')\n"
        "outputs = model.generate(json.loads(sys.argv[3]), SamplingParams(temperature=0, max_tokens=12, logprobs=3))\n"
        "print(json.dumps([[o.outputs[0].token_ids, [s.logprob for s in o.outputs[0].logprobs]] for o in outputs]))\n"
    )
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    command = [*launch, str(script), str(package(tmp_path, 4).path), str(packages["weights"]), json.dumps(PROMPTS)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for (tokens, logprobs), expected in zip(json.loads(done.stdout), alone(packages, 12), strict=True):
        assert tuple(tokens) == expected.token_ids
        assert logprobs == pytest.approx([s.logprob for s in expected.logprobs], abs=1e-5)


@pytest.mark.full
def test_the_number_of_processes_must_fit(packages: dict[str, Path]) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    for count, which in (("2", "1"), ("3", "2")):
        command = [*launch, count, *serve(packages[which], packages["weights"])[1:]]
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120)
        expected = "2 processes were started, and" if which == "1" else "needs 2 processes, and 3 were started"
        assert done.returncode == 1 and done.stderr.count(expected) == 1
    with pytest.raises(MeshError, match=r"mesh tp=2 needs 2 processes, and 1 were started"):
        LLM(packages["2"], packages["weights"], device="cpu")


@pytest.mark.full
@pytest.mark.parametrize("model", ["gpt-oss-tiny", "moe-tiny", "dense-tiny-geglu", "dense-tiny-capped"])
def test_families(model: str, tmp_path: Path) -> None:
    """Sinks, experts that stay whole, a head that is the embedding, capped logits. Parameters are drawn."""
    said = []
    for mesh in ("dp=*", "tp=2"):
        recipe = Recipe(model, "serve", mesh, arch="none", max_length=64, output=str(tmp_path / mesh))
        built = compile_package(recipe).package
        assert built is not None
        ask = ["--prompt", "The cat sat on", "--max-new-tokens", "40", "--random-init", "--device", "cpu"]
        command = [sys.executable, str(built / "serve.py"), *ask]
        done = subprocess.run(command, env=environment(), capture_output=True, timeout=120)
        assert done.returncode == 0, done.stderr
        said.append(done.stdout)
    assert said[0] == said[1] and len(set(said[0])) > 10
