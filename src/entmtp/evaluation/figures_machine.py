"""Figures of the machine and of what draft heads cost on it. As in `figures`: data in, a matplotlib Figure out."""

from matplotlib.figure import Figure

from entmtp.config import PlotConfig
from entmtp.evaluation.figures import MARKERS, nodes_axis, panels, styled


def vocabulary_curve(rows: list[dict], knee: int, plot: PlotConfig) -> Figure:
    """Coverage of held-out tokens and relative speed against the draft vocabulary's size, the chosen size marked."""
    with styled(plot) as colours:
        fig, axes = panels(1, 1, 6.5, 3.6)
        ax = axes[0, 0]
        sizes = [row["size"] for row in rows]
        ax.plot(sizes, [row["coverage"] for row in rows], MARKERS[0] + "-", color=colours[0], label="coverage")
        ax.set(xlabel="draft vocabulary (tokens)", ylabel="share of held-out tokens", xscale="log")
        right = ax.twinx()
        speed = [row["relative_speed"] for row in rows]
        right.plot(sizes, speed, MARKERS[1] + "--", color=colours[1], label="relative speed")
        right.set_ylabel("tokens/s over plain (estimate)")
        right.grid(False)
        ax.axvline(knee, color="0.2", ls=":", lw=1.1, label=f"knee: {knee}")
        lines = [*ax.get_lines(), *right.get_lines()]
        ax.legend(lines, [line.get_label() for line in lines], loc="lower right", fontsize=9)
    return fig


def roofline(rows: list[dict], plot: PlotConfig) -> Figure:
    """Milliseconds of a forward against drafted nodes, a panel per dtype and a line per context, over both floors:
    reading weights and cache once, and multiplying for that many rows. `rows` of engine.json."""
    forward = [row for row in rows if row["stage"] == "forward"]
    dtypes = list(dict.fromkeys(row["dtype"] for row in forward))
    with styled(plot) as colours:
        fig, axes = panels(1, len(dtypes), 5.2, 4.0)
        for ax, dtype in zip(axes[0], dtypes, strict=True):
            of_dtype = [row for row in forward if row["dtype"] == dtype]
            contexts = list(dict.fromkeys(row["context"] for row in of_dtype))
            for i, context in enumerate(contexts):
                rows = [row for row in of_dtype if row["context"] == context]
                nodes = [row["nodes"] for row in rows]
                line = {"color": colours[i], "label": f"context {context}"}
                ax.plot(nodes, [row["ms"] for row in rows], MARKERS[i] + "-", ms=5, **line)
                floor = [max(row["floor_ms"], row["compute_ms"]) for row in rows]
                ax.plot(nodes, floor, ":", color=colours[i], label=f"floor, context {context}")
            nodes_axis(ax, max(row["nodes"] for row in of_dtype))
            ax.set(title=dtype, xlabel="drafted nodes", ylabel="forward (ms)")
            ax.set_ylim(bottom=0)
            ax.legend(fontsize=8)
    return fig
