"""The loss curve of a run as a picture: training and validation loss over steps, and the unigram entropy as a line.

A model that has learnt nothing but the frequency of each byte sits on that line; what lies below it is structure.
"""

from __future__ import annotations

from pathlib import Path

Points = list[tuple[int, float]]
"""(step, loss) in order of steps."""

_SMOOTHING = 0.9


def save_loss_curve(path: Path, train: Points, validation: Points, unigram: float, title: str) -> None:
    """Write a PNG; losses and `unigram` in nats per token. Raises `ImportError` without matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Figure and canvas directly: pyplot would choose a window system and keep state for the whole process.
    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    steps = [step for step, _ in train]
    losses = [loss for _, loss in train]
    axes.plot(steps, losses, color="tab:blue", alpha=0.25, linewidth=0.8)
    axes.plot(steps, smooth(losses), color="tab:blue", linewidth=1.6, label="training (smoothed)")
    if validation:
        axes.plot(*zip(*validation, strict=True), color="tab:orange", marker="o", markersize=4, label="validation")
        step, loss = validation[-1]
        axes.annotate(f"{loss:.3f}", (step, loss), xytext=(-4, -14), textcoords="offset points", ha="right")
    axes.axhline(unigram, color="tab:gray", linestyle="--", linewidth=1, label=f"unigram entropy ({unigram:.3f})")
    axes.set(xlabel="step", ylabel="loss in nats per token", title=title)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def smooth(values: list[float]) -> list[float]:
    """Exponential mean over about ten steps, corrected so that the first values are not pulled to zero."""
    result, total, weight = [], 0.0, 0.0
    for value in values:
        total = _SMOOTHING * total + (1 - _SMOOTHING) * value
        weight = _SMOOTHING * weight + (1 - _SMOOTHING)
        result.append(total / weight)
    return result
