"""What the server has done so far, for Prometheus, under llama-server's names."""

from __future__ import annotations

from collections.abc import Iterator

from ...errors import PlanError, installation
from .engine import Engine


def metrics_text(engine: Engine) -> tuple[bytes, str]:
    """(the metrics, their media type). Raises PlanError without prometheus-client."""
    try:
        from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
        from prometheus_client.metrics_core import Metric
        from prometheus_client.registry import Collector
    except ImportError:
        raise PlanError(f"metrics need prometheus-client: {installation('prometheus-client')}") from None

    class Metrics(Collector):
        def collect(self) -> Iterator[Metric]:
            total, counts, n_tasks, n_slots = engine.totals, engine.counts, engine.n_tasks, engine.n_slots
            for name, text, value in (
                ("prompt_tokens", "Tokens of prompts that were computed.", total.prompt_tokens),
                ("prompt_tokens_cached", "Tokens of prompts that the cache had.", total.cached_tokens),
                ("prompt_seconds", "Seconds of reading prompts.", total.prompt_seconds),
                ("tokens_predicted", "Tokens that were generated.", total.generated_tokens),
                ("tokens_predicted_seconds", "Seconds of generating.", total.generated_seconds),
                ("n_decode", "Passes through the model.", counts.passes),
                ("spec_decode_num_draft_tokens", "Tokens that were drafted.", total.drafted_tokens),
                ("spec_decode_num_accepted_tokens", "Drafted tokens that were right.", total.accepted_tokens),
            ):
                yield CounterMetricFamily(f"llamacpp:{name}", text, value=value)
            for name, text, value in (
                ("n_tokens_max", "Tokens of the longest sequence so far.", counts.longest),
                ("prompt_tokens_seconds", "Tokens of prompts per second.", total.prompt_per_second),
                ("predicted_tokens_seconds", "Generated tokens per second.", total.generated_per_second),
                ("requests_processing", "Tasks that run.", min(n_tasks, n_slots)),
                ("requests_deferred", "Tasks that wait.", max(n_tasks - n_slots, 0)),
                ("n_busy_slots_per_decode", "Tasks that run during a pass.", counts.busy_slots / max(counts.passes, 1)),
            ):
                yield GaugeMetricFamily(f"llamacpp:{name}", text, value=value)

    registry = CollectorRegistry()
    registry.register(Metrics())
    return generate_latest(registry), CONTENT_TYPE_LATEST
