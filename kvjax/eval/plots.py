"""Pictures of results."""

from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from kvjax.checks import shown
from kvjax.errors import UserError
from kvjax.extras import check_extra


def check_plots(what: str) -> None:
    """Refuse, before anything slow, what draws pictures where nothing can.

    Args:
        what: draws them.

    Raises:
        UserError: matplotlib is not installed.
    """
    check_extra("matplotlib", "plots", what)


def check_picture(option: str, path: str | Path) -> None:
    """Refuse, before anything slow, a picture that could not be drawn in the end.

    Args:
        option: asks for it.
        path: its file; the ending decides the format.

    Raises:
        UserError: matplotlib is not installed, or has no such format.
    """
    check_plots(option)
    from matplotlib.backend_bases import FigureCanvasBase

    if Path(path).suffix[1:].lower() not in FigureCanvasBase.get_supported_filetypes():
        raise UserError(
            f"{option} {shown(str(path))}: there are no such pictures; give a name that ends in "
            ".png, .svg or .pdf"
        )


def new_figure(width: float, height: float) -> Any:
    """An empty figure of so many inches.

    Raises:
        UserError: matplotlib is not installed.
    """
    check_plots("a picture")
    # Imported here: it takes a second that most runs need not spend.
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure, path: str | Path) -> None:
    """Write a figure; the ending of the path decides the format.

    Raises:
        UserError: the ending or the folder does not do.
    """
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot write the picture {path}: {error}") from error


def plot_kept(kept: Int[np.ndarray, "L H"], title: str, path: str | Path) -> None:
    """How many KVs each layer × KV head keeps: a map, and the mean of each layer beside it."""
    num_layers, num_heads = kept.shape
    figure = new_figure(5.5 + 0.2 * num_heads, 2.5 + 0.14 * num_layers)
    from matplotlib.ticker import MaxNLocator

    heat, bars = figure.subplots(
        1, 2, sharey=True, gridspec_kw={"width_ratios": [max(1.5, num_heads / 4), 2]}
    )
    image = heat.imshow(kept, aspect="auto", cmap="viridis", vmin=0)
    heat.set_xlabel("KV head")
    heat.set_ylabel("layer")
    heat.xaxis.set_major_locator(MaxNLocator(integer=True))
    heat.yaxis.set_major_locator(MaxNLocator(integer=True))
    figure.colorbar(image, ax=heat, label="KVs kept", location="left")
    layers = np.arange(num_layers)
    low, mean, high = kept.min(axis=1), kept.mean(axis=1), kept.max(axis=1)
    bars.barh(layers, mean, color="#5b8db8", label="mean of the layer")
    bars.hlines(layers, low, high, color="#222222", linewidth=1, label="smallest to largest head")
    bars.set_xlabel("KVs kept per head")
    bars.set_xlim(left=0)
    figure.suptitle(title, fontsize=10)
    figure.legend(
        *bars.get_legend_handles_labels(), loc="outside lower center", fontsize=8, ncols=2
    )
    save_figure(figure, path)


def plot_fit(
    explained: Float[np.ndarray, "L H"], ranks: Float[np.ndarray, "L H"], path: str | Path
) -> None:
    """How well a calibration predicts texts that it was not made from, by layer."""
    figure = new_figure(7.5, 4.2)
    axes = figure.subplots()
    layers = np.arange(len(explained))
    for values, label, colour in (
        (ranks, "rank correlation", "#b8705b"),
        (explained, "R²", "#5b8db8"),
    ):
        axes.plot(layers, values.mean(axis=1), "o-", markersize=3, color=colour, label=label)
        axes.fill_between(
            layers, values.min(axis=1), values.max(axis=1), color=colour, alpha=0.2, linewidth=0
        )
    axes.set_xlabel("layer")
    axes.set_ylabel("mean over KV heads; shaded: lowest to highest")
    axes.set_ylim(min(0.0, float(explained.min())), 1)
    axes.grid(alpha=0.3)
    axes.set_title("Predicted and true scores of texts held out", fontsize=10)
    axes.legend(loc="lower left")
    save_figure(figure, path)
