"""What was measured, as tables: ratios, losses, and the targets the project set itself."""

import math
import os
import platform
import statistics
from dataclasses import dataclass, field

KIB, MIB = 1 << 10, 1 << 20
ANY = None

# The least ratio wanted: on a machine with this many cores, for this operation, transport,
# world and peer, from this size on. Of several that apply, the highest counts.
TARGETS = [
    # cores      op                transport worlds    peer    from       ratio
    (range(1, 3), "all-reduce",     "shm",    {2},      "gloo", 1 * KIB,   6.0),
    (range(1, 3), "all-reduce",     "shm",    {2},      "mpi",  1 * KIB,   1.0),
    (range(1, 3), "all-reduce",     "shm",    {2},      "mpi",  16 * KIB,  2.0),
    (range(1, 3), "all-reduce",     "shm",    {2},      "mpi",  16 * MIB,  4.0),
    (range(1, 3), "all-reduce",     "shm",    {4},      "gloo", 1 * KIB,   4.0),
    (range(1, 3), "all-reduce",     "shm",    {4},      "mpi",  1 * MIB,   1.2),
    (range(1, 3), "all-reduce",     "shm",    {4},      "mpi",  64 * MIB,  3.0),
    (range(16, 10**6), "all-reduce", "shm",   {8, 16},  "gloo", 1 * KIB,   3.0),
    (range(16, 10**6), "all-reduce", "shm",   {8, 16},  "mpi",  64 * KIB,  2.0),
    (ANY,         "all-reduce",     "tcp",    {2, 4, 8}, "gloo", 1 * KIB,  1.5),
    (ANY,         "all-reduce",     "tcp",    {2, 4, 8}, "mpi",  1 * KIB,  1.2),
    (ANY,         "all-reduce",     "gpu",    {2},      "gloo", 64 * MIB,  30.0),
    (ANY,         "all-reduce",     "gpu",    {2},      "nccl", 64 * MIB,  30.0),
    (ANY,         "reduce-scatter", ANY,      ANY,      "gloo", 0,         1.0),
    (ANY,         "all-gather",     ANY,      ANY,      "gloo", 0,         1.0),
    (ANY,         "broadcast",      ANY,      ANY,      "gloo", 0,         1.0),
]


def target(op, transport, world, peer, size, cores):
    """The least ratio wanted against `peer`, or None where no target was set."""
    ratios = [
        ratio
        for on_cores, of_op, over, worlds, against, start, ratio in TARGETS
        if of_op == op
        and against == peer
        and size >= start
        and (on_cores is ANY or cores in on_cores)
        and (over is ANY or over == transport)
        and (worlds is ANY or world in worlds)
    ]
    return max(ratios, default=None)


@dataclass
class Row:
    """One size: the samples of every system, pooled over the repetitions, and its failures."""

    size: int
    samples: dict = field(default_factory=dict)
    failures: dict = field(default_factory=dict)
    other_loads: list = field(default_factory=list)  # cores that other work took, run by run
    limit: float | None = None  # µs that the machine needs at least, as Unisono measures it
    without_limit: str | None = None  # why there is none, where one was asked for

    @property
    def other_load(self):
        return statistics.mean(self.other_loads) if self.other_loads else 0.0

    def median(self, key):
        return statistics.median(self.samples[key]) if self.samples.get(key) else None

    def p99(self, key):
        if not self.samples.get(key):
            return None
        ordered = sorted(self.samples[key])
        return ordered[math.ceil(0.99 * len(ordered)) - 1]

    def ratio(self, peer):
        ours, theirs = self.median("unisono"), self.median(peer)
        return theirs / ours if ours and theirs else None


@dataclass
class Table:
    """One operation, world and transport."""

    op: str
    world: int
    transport: str
    systems: list
    cores: int
    rows: list = field(default_factory=list)

    @property
    def title(self):
        return f"{self.op}, {self.world} ranks, {self.transport}"

    def peers(self):
        return [system for system in self.systems if system.key != "unisono"]

    def has_unisono(self):
        return any(system.key == "unisono" for system in self.systems)

    def has_limits(self):
        return any(row.limit or row.without_limit for row in self.rows)

    def target(self, row, peer):
        return target(self.op, self.transport, self.world, peer, row.size, self.cores)

    def markdown(self):
        header = ["size", "limit µs"] if self.has_limits() else ["size"]
        for system in self.systems:
            header += [f"{system.title} µs", "p99"]
        if self.has_unisono():
            header += [f"× {peer.title}" for peer in self.peers()] + ["verdict"]
        body = []
        for row in self.rows:
            cells = [size_text(row.size)]
            if self.has_limits():
                cells.append(_microseconds(row.limit))
            for system in self.systems:
                cells += [_microseconds(row.median(system.key)), _microseconds(row.p99(system.key))]
            if self.has_unisono():
                cells += [_ratio(row.ratio(peer.key)) for peer in self.peers()]
                cells.append(self.verdict(row))
            body.append(cells)
        return _markdown_table(header, body)

    def note(self):
        worst = max((row.other_load for row in self.rows), default=0.0)
        sentences = [f"Other work on the machine meanwhile: {worst:.1f} cores in the worst row."]
        for why in dict.fromkeys(row.without_limit for row in self.rows if row.without_limit):
            sizes = ", ".join(size_text(row.size) for row in self.rows if row.without_limit == why)
            sentences.append(f"No limit for {sizes}: {why}.")
        return " ".join(sentences)

    def verdict(self, row):
        """Losses first, then targets missed; `ok` only where all set targets are met."""
        remarks = [f"FAILED {key}" for key in row.failures]
        targets = 0
        for peer in self.peers():
            ratio, wanted = row.ratio(peer.key), self.target(row, peer.key)
            if ratio is None:
                continue
            if _is_loss(peer.key, ratio):
                remarks.append(f"LOSS to {peer.title}")
            if wanted is not None:
                targets += 1
                if ratio < wanted:
                    remarks.append(f"{peer.title} target {wanted:g}× missed")
        return "; ".join(remarks) or ("ok" if targets else "")

    def records(self):
        """One flat object per row, for --json."""
        for row in self.rows:
            yield {
                "op": self.op,
                "ranks": self.world,
                "transport": self.transport,
                "bytes": row.size,
                "limit_us": row.limit and round(row.limit, 3),
                "systems": {
                    key: {
                        "median_us": round(row.median(key), 3),
                        "p99_us": round(row.p99(key), 3),
                        "samples": len(samples),
                    }
                    for key, samples in row.samples.items()
                    if samples
                },
                "ratios": {
                    peer.key: {
                        "ratio": round(row.ratio(peer.key), 3),
                        "target": self.target(row, peer.key),
                    }
                    for peer in self.peers()
                    if row.ratio(peer.key)
                },
                "failures": row.failures,
                "other_load_cores": round(row.other_load, 2),
            }


def _is_loss(peer, ratio):
    """Two builds that are equal differ by a few percent, by the layout of their code alone."""
    return ratio < (0.95 if peer == "before" else 1)


def summary(tables):
    """How many of the measured ratios are losses, and how many targets are met."""
    ratios = [
        (row.ratio(peer.key), table.target(row, peer.key), peer.key)
        for table in tables
        for row in table.rows
        for peer in table.peers()
        if row.ratio(peer.key)
    ]
    with_target = [(ratio, wanted) for ratio, wanted, _ in ratios if wanted is not None]
    met = sum(ratio >= wanted for ratio, wanted in with_target)
    losses = sum(_is_loss(key, ratio) for ratio, _, key in ratios)
    return f"{losses} losses in {len(ratios)} ratios; {met} of {len(with_target)} targets met"


def machine():
    """The machine in one line."""
    model = platform.machine()
    try:
        with open("/proc/cpuinfo") as cpuinfo:
            names = [line.split(":", 1)[1].strip() for line in cpuinfo if "model name" in line]
        model = names[0] if names else model
    except OSError:
        pass
    return f"{cores()} cores, {model}, {platform.system()} {platform.release()}"


def cores():
    return len(os.sched_getaffinity(0))


def size_text(size):
    for unit, name in ((1 << 30, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size >= unit and size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size} B"


def _microseconds(value):
    if value is None:
        return "—"
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def _ratio(value):
    return "—" if value is None else f"{value:.2f}"


def _markdown_table(header, body):
    """Aligned, so that it reads as well on a terminal as in a document."""
    columns = list(zip(header, *body))
    widths = [max(map(len, column)) for column in columns]
    left = {0, len(header) - 1} if header[-1] == "verdict" else {0}

    def line(cells):
        padded = (
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths))
        )
        return "| " + " | ".join(padded) + " |"

    rule = "|".join(
        "-" * (width + 2) if i in left else "-" * (width + 1) + ":"
        for i, width in enumerate(widths)
    )
    return "\n".join([line(header), f"|{rule}|", *map(line, body)])
