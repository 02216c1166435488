"""Numbers for Prometheus: what is under way, what was done, and how long it took."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from mgraph.runtime.serving.engine import Delta, Engine

LATENCIES = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
GAPS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)

WANTED = (1, 2, 5, 10, 20, 50, 100)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True)
class _Said:
    """When the first and the last token of a sequence came, and how many there were."""

    first: float
    last: float
    count: int


class Metrics:
    """All metrics of one engine, in a registry of their own. They are labelled with the model's name."""

    def __init__(self, engine: Engine, model: str) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_State(engine, model))
        self._model = model
        self._said: dict[tuple[int, int], _Said] = {}
        self._ended = Counter(
            "mgraph_request_success",
            "Sequences that ended, by reason.",
            ("model_name", "finished_reason"),
            registry=self._registry,
        )
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", LATENCIES
        )
        self._gap = self._histogram("inter_token_latency_seconds", "Between tokens of a sequence.", GAPS)
        self._whole = self._histogram("e2e_request_latency_seconds", "From arrival to the end.", LATENCIES)
        self._queue = self._histogram("request_queue_time_seconds", "From arrival to admission.", LATENCIES)
        self._prefill = self._histogram("request_prefill_time_seconds", "From admission to the first token.", LATENCIES)
        self._decode = self._histogram("request_decode_time_seconds", "From the first token to the last.", LATENCIES)
        self._tokens = self._histogram("request_generation_tokens", "Generated tokens of a sequence.", TOKENS)
        self._prompt = self._histogram("request_prompt_tokens", "Tokens of a prompt.", TOKENS)
        self._wanted = self._histogram("request_params_n", "Continuations that were asked for.", WANTED)
        self._most = self._histogram(
            "request_params_max_tokens", "Tokens that may be generated for a continuation.", TOKENS
        )

    def asked(self, prompt: int, n: int, most: int) -> None:
        """Note a request: tokens of its prompt, continuations, and tokens of each at most."""
        for histogram, value in ((self._prompt, prompt), (self._wanted, n), (self._most, most)):
            histogram.labels(self._model).observe(value)

    def watch(self, deltas: Sequence[Delta]) -> None:
        """Note what a step brought."""
        now = time.monotonic()
        for delta in deltas:
            key = (delta.group, delta.index)
            if delta.tokens:
                said = self._said.get(key)
                if said is not None:
                    self._gap.labels(self._model).observe(now - said.last)
                    self._said[key] = _Said(said.first, now, said.count + len(delta.tokens))
                else:
                    self._first_token.labels(self._model).observe(now - delta.arrived)
                    self._queue.labels(self._model).observe(delta.queued)
                    self._prefill.labels(self._model).observe(max(0.0, now - delta.arrived - delta.queued))
                    self._said[key] = _Said(now, now, len(delta.tokens))
            if delta.finish_reason is not None:
                said = self._said.pop(key, None)
                self._whole.labels(self._model).observe(now - delta.arrived)
                self._tokens.labels(self._model).observe(said.count if said else 0)
                if said is not None:
                    self._decode.labels(self._model).observe(said.last - said.first)
                self._ended.labels(self._model, delta.finish_reason).inc()

    def text(self) -> bytes:
        """As Prometheus reads it."""
        return generate_latest(self._registry)

    def _histogram(self, name: str, about: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(f"mgraph_{name}", about, ("model_name",), buckets=buckets, registry=self._registry)


class _State(Collector):
    """What the engine counts by itself, read when it is asked for."""

    def __init__(self, engine: Engine, model: str) -> None:
        self._engine, self._model = engine, model

    def collect(self) -> Iterator[Metric]:
        scheduler = self._engine.scheduler
        pool, counts = scheduler.pool, scheduler.counts
        gauges = (
            ("num_requests_running", "Sequences that take part in steps.", len(scheduler.running)),
            ("num_requests_waiting", "Sequences that wait for room.", len(scheduler.waiting)),
            ("kv_cache_usage_perc", "The part of the cache that is held, 0 to 1.", 1 - pool.available / pool.usable),
        )
        counters = (
            ("prompt_tokens", "Tokens of prompts.", self._engine.prompted),
            ("generation_tokens", "Generated tokens.", self._engine.generated),
            ("prefix_cache_queries", "Tokens of prompts that were looked up in the cache.", counts.prefix_queries),
            ("prefix_cache_hits", "Tokens of prompts that were found in the cache.", counts.prefix_hits),
            ("num_preemptions", "Sequences that had to give their blocks back.", counts.preemptions),
            ("steps", "Steps of the model.", self._engine.steps),
        )
        launches = CounterMetricFamily(
            "mgraph_steps_by_launch",
            "Steps by how they were launched: as a graph, or why not.",
            labels=("model_name", "launch"),
        )
        for launch, count in self._engine.stepper.launches.items():
            launches.add_metric([self._model, launch], count)
        yield launches
        yield self._tokens_of_steps()
        for name, about, value in gauges:
            gauge = GaugeMetricFamily(f"mgraph_{name}", about, labels=["model_name"])
            gauge.add_metric([self._model], value)
            yield gauge
        for name, about, value in counters:
            counter = CounterMetricFamily(f"mgraph_{name}", about, labels=["model_name"])
            counter.add_metric([self._model], value)
            yield counter

    def _tokens_of_steps(self) -> Metric:
        """How many tokens steps had, of prompts and generated ones."""
        shapes = self._engine.shapes.copy()
        bounds = [(str(float(bound)), bound) for bound in TOKENS] + [("+Inf", math.inf)]
        within = [(text, sum(c for (n, _), c in shapes.items() if n <= bound)) for text, bound in bounds]
        about = "Tokens of a step: of prompts, and generated before."
        family = HistogramMetricFamily("mgraph_iteration_tokens_total", about, labels=["model_name"])
        family.add_metric([self._model], within, sum(n * c for (n, _), c in shapes.items()))
        return family
