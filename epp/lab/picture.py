"""The demo's picture: both policies side by side."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from epp.errors import WarmrouteError

if TYPE_CHECKING:
    from epp.lab.demo import Played

_COLOURS = {"round robin": "#9aa5b1", "Warmroute": "#e4572e"}


def side_by_side(path: Path, round_robin: "Played", warmroute: "Played", best: float) -> None:
    """Write a PNG of four panels: TTFT over time and its distribution, hit ratio, requests per engine.

    Raises:
        WarmrouteError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise WarmrouteError("the picture needs matplotlib: pip install 'warmroute[lab]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    runs = {"round robin": round_robin, "Warmroute": warmroute}
    figure, axes = pyplot.subplots(2, 2, figsize=(11, 7), layout="constrained")
    figure.suptitle("The same chats through Envoy: round robin and Warmroute (simulated engines)")
    _over_time(axes[0, 0], runs)
    _distribution(axes[0, 1], runs)
    _hits(axes[1, 0], runs, best)
    _per_engine(axes[1, 1], runs)
    handles, labels = axes[0, 1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _scale(runs: "dict[str, Played]") -> str:
    """Of an axis of times; nothing at all cannot be put on a logarithmic one."""
    return "log" if any(len(run.ttft_ms()) for run in runs.values()) else "linear"


def _over_time(axes: Any, runs: "dict[str, Played]") -> None:
    for name, run in runs.items():
        good = [each for each in run.answered if each.ttft_s is not None and not each.error]
        axes.scatter(
            [each.started_s for each in good],
            [(each.ttft_s or 0.0) * 1e3 for each in good],
            s=9,
            alpha=0.6,
            color=_COLOURS[name],
            label=name,
            linewidths=0,
        )
    axes.set(
        title="Time to first token of each request",
        xlabel="seconds into the run",
        ylabel="ms",
        yscale=_scale(runs),
    )


def _distribution(axes: Any, runs: "dict[str, Played]") -> None:
    for name, run in runs.items():
        ttft_ms = np.sort(run.ttft_ms())
        share = np.arange(1, len(ttft_ms) + 1) / max(len(ttft_ms), 1)
        axes.step(ttft_ms, share, where="post", color=_COLOURS[name], label=name, linewidth=2)
    axes.axhline(0.9, color="#444444", linewidth=0.6, linestyle=":")
    axes.set(
        title="Share of requests answered within",
        xlabel="time to first token, ms",
        ylim=(0, 1.02),
        xscale=_scale(runs),
    )


def _hits(axes: Any, runs: "dict[str, Played]", best: float) -> None:
    summaries = {name: run.summary() for name, run in runs.items()}
    ratios = [each.hit_ratio for each in summaries.values()]
    bars = axes.barh(list(summaries), ratios, color=[_COLOURS[name] for name in summaries], height=0.55)
    for bar, each in zip(bars, summaries.values(), strict=True):
        axes.text(
            0.01,
            bar.get_y() + bar.get_height() / 2,
            f"{each.hit_ratio:.2f} cached, {each.output_tokens_per_s:,.0f} output tokens/s",
            va="center",
            color="black",
        )
    axes.axvline(best, color="#444444", linestyle="--", linewidth=1)
    beside, align = (best - 0.01, "right") if best > 0.5 else (best + 0.01, "left")
    axes.text(beside, 1.42, "one infinite cache", ha=align, va="center", color="#444444")
    axes.set(title="Prompt tokens found in cache", xlim=(0, 1), ylim=(1.6, -0.5))


def _per_engine(axes: Any, runs: "dict[str, Played]") -> None:
    width = 0.4
    for index, (name, run) in enumerate(runs.items()):
        counts = [engine.requests for engine in run.stats.engines]
        at = np.arange(1, len(counts) + 1) + (index - 0.5) * width
        axes.bar(at, counts, width, color=_COLOURS[name], label=name)
    axes.set(title="Requests per engine", xlabel="engine")
