"""One HTML page about a store, to look at instead of logs.

    python -m actdump.report STORE [-o report.html] [--scan-bytes 4e9]

Norms, variances, half-lives and counts are exact: they come from the store's statistics of all rows. What must be read
anew (where the largest magnitudes are, routing) is read of all rows where a value has no more than --scan-bytes, else
of chunks spread evenly over it, and the page says of how many rows. The page loads nothing from elsewhere, and holds
its figures as JSON (element "figures")."""

from __future__ import annotations

import argparse
import html
import json
import math
import os
import sys
from pathlib import Path
from typing import Any, Iterator

import numpy as np

import actdump
from actdump.errors import StoreError
from actdump.store import Store, Value, _size

STREAM = ("layer_input", "layer_mid", "layer_output")
SCAN_BYTES = 4e9
LONG = 24  # rows of a table before the rest is folded


# ---------------------------------------------------------------- figures


def figures(store: Store, scan_bytes: float = SCAN_BYTES) -> dict[str, Any]:
    """What the page shows, as plain numbers."""
    info = store.info
    return {
        "store": str(store.path),
        "family": info["model"]["family"],
        "complete": store.complete,
        "missing_units": len(store.missing_units),
        "totals": info["totals"],
        "summary": info.get("summary"),
        "stream": _stream(store),
        "values": [_value(v, scan_bytes) for v in store.values.values()],
        "routing": _routing(store, scan_bytes),
        "half_lives": _half_lives(store),
        "throughput": _throughput(store),
    }


def _scan(value: Value, scan_bytes: float) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(row numbers, rows) chunk by chunk: all of them, or chunks spread evenly, of about scan_bytes together."""
    chunks = [
        (int(a) + b, min(int(a) + b + value.chunk_rows, int(end)))
        for a, end in zip(value.first[:-1], value.first[1:])
        for b in range(0, int(end - a), value.chunk_rows)
    ]
    keep = max(1, min(len(chunks), int(scan_bytes // max(1, value.chunk_rows * value.row_bytes))))
    for i in range(keep) if chunks else ():
        begin, end = chunks[i * len(chunks) // keep]
        yield np.arange(begin, end), value[begin:end]


def _place(value: Value, row: int) -> dict[str, Any]:
    if value.axes[0] == "sequence":
        table = value.store.sequences
        return {"row": row, "sequence": int(table["number"][row]), "document": int(table["document"][row])}
    found = value.capture.rows([row])
    return {"row": row, **{k: int(found[k][0]) for k in ("sequence", "document", "position", "input_ids")}}


def _value(value: Value, scan_bytes: float) -> dict[str, Any]:
    stored = sum(value.store._files.dataset(i, value).id.get_storage_size() for i in range(len(value.store.segments)))
    out: dict[str, Any] = {
        "path": value.path,
        "shape": list(value.shape),
        "layout": value.layout,
        "dtype": value.dtype,
        "bytes": len(value) * value.row_bytes,
        "stored_bytes": stored,
    }
    if not value.is_float or not len(value):
        return out
    best, at, n_rows, n_nonfinite, first_bad = -1.0, (0, 0), 0, 0, None
    masked = value.name == "attention_scores"  # minus infinity is the mask there
    for numbers, rows in _scan(value, scan_bytes):
        flat = np.abs(rows.reshape(len(rows), -1).astype(np.float32, copy=False))
        finite = np.isfinite(flat)
        bad = ~finite & ~np.isneginf(rows.reshape(flat.shape)) if masked else ~finite
        if bad.any():
            n_nonfinite += int(bad.sum())
            first_bad = first_bad if first_bad is not None else int(numbers[bad.any(axis=1).argmax()])
        flat[~finite] = -1
        top, n_rows = int(flat.argmax()), n_rows + len(rows)
        if flat.flat[top] > best:
            best, at = float(flat.flat[top]), (int(numbers[top // flat.shape[1]]), top % flat.shape[1])
    statistics = value.statistics or {}
    out |= {
        "scanned_rows": n_rows,
        "n_nonfinite": statistics.get("n_nonfinite", n_nonfinite),
        "n_overflow": statistics.get("n_overflow"),
        "max_abs": statistics.get("max_abs", best if best >= 0 else None),
    }
    if best >= 0:
        index = [int(i) for i in np.unravel_index(at[1], value.row_shape)]
        out["largest"] = {"magnitude": best, "index": index, **_place(value, at[0])}
    bad_row = statistics.get("first_nonfinite_row") if value.statistics else first_bad
    if bad_row is not None:
        out["first_nonfinite"] = _place(value, bad_row)
    return out


def _stream(store: Store) -> list[dict[str, Any]]:
    out = []
    for value in store.values.values():
        if value.name in STREAM and value.layer >= 0 and len(value):
            moments = value.moments()
            out.append(
                {
                    "capture": value.capture.name,
                    "value": value.name,
                    "layer": value.layer,
                    "mean_norm": moments["mean_norm"],
                    "variance": float(np.nanmean(moments["variance"])) if moments["count"].any() else math.nan,
                }
            )
    return sorted(out, key=lambda s: (s["capture"], s["value"], s["layer"]))


def _routing(store: Store, scan_bytes: float) -> list[dict[str, Any]]:
    """Share of routing slots of each expert, its entropy, and the mean entropy of softmax(router_logits), in bits."""
    out: dict[tuple[str, int], dict[str, Any]] = {}
    for value in store.values.values():
        if value.host != "mlp" or value.name not in ("expert_indices", "router_logits") or not len(value):
            continue
        entry = out.setdefault((value.capture.name, value.layer), {"capture": value.capture.name, "layer": value.layer})
        n_rows, counts, total = 0, np.zeros(0, np.int64), 0.0
        for _, rows in _scan(value, scan_bytes):
            n_rows += len(rows)
            if value.name == "expert_indices":
                found = np.bincount(rows.ravel())
                counts = np.pad(counts, (0, max(0, len(found) - len(counts))))
                counts[: len(found)] += found
            else:
                total += float(_entropy(rows.astype(np.float64)).sum())
        if value.name == "expert_indices":
            entry |= {"load": (counts / counts.sum()).tolist(), "load_rows": n_rows}
        else:
            entry |= {"router_entropy": total / n_rows, "router_rows": n_rows, "n_experts": value.row_shape[0]}
    for entry in out.values():
        if "load" in entry:
            entry["n_experts"] = max(entry.get("n_experts", 0), len(entry["load"]))
            entry["load"] += [0.0] * (entry["n_experts"] - len(entry["load"]))
            p = np.array([x for x in entry["load"] if x > 0])
            entry["load_entropy"] = abs(float(-(p * np.log2(p)).sum()))
    return [out[k] for k in sorted(out)]


def _entropy(logits: np.ndarray) -> np.ndarray:
    """Of each row's softmax, in bits."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    weights = np.exp(shifted)
    total = weights.sum(axis=-1)
    return (np.log(total) - (weights * shifted).sum(axis=-1) / total) / math.log(2)


def _half_lives(store: Store) -> list[dict[str, Any]]:
    """Tokens until a state's content has fallen to a half: ln 2 over the mean log decay, over a layer's states."""
    out = []
    for value in store.values.values():
        if value.name == "decays" and len(value):
            rate = -value.moments()["mean"].ravel()
            lives = math.log(2) / rate[rate > 0]
            if len(lives):
                out.append(
                    {
                        "capture": value.capture.name,
                        "layer": value.layer,
                        "states": len(lives),
                        **{f"p{q}": float(np.percentile(lives, q)) for q in (10, 50, 90)},
                        "max": float(lives.max()),
                    }
                )
    return sorted(out, key=lambda s: (s["capture"], s["layer"]))


def _throughput(store: Store) -> list[dict[str, float]]:
    """Tokens a second between the times at which segments were written; of up to 60 stretches of the job."""
    written = sorted((os.stat(store.path / s["file"]).st_mtime, s["n_tokens"]) for s in store.segments)
    if len(written) < 3 or written[-1][0] - written[0][0] < 1:
        return []
    n = min(60, len(written) - 1)
    marks = sorted({i * (len(written) - 1) // n for i in range(n + 1)})
    out = []
    for a, b in zip(marks[:-1], marks[1:]):
        seconds = written[b][0] - written[a][0]
        if seconds > 0:
            out.append(
                {
                    "hours": (written[b][0] - written[0][0]) / 3600,
                    "tokens_per_second": sum(t for _, t in written[a + 1 : b + 1]) / seconds,
                }
            )
    return out


# ---------------------------------------------------------------- the page

STYLE = """
:root { color-scheme: light dark; --page: #fbfaf7; --ink: #1f2328; --soft: #646b73; --line: #dcdad3; --card: #fff;
  --c0: #1f6feb; --c1: #c2570c; --c2: #2b8a3e; --bad: #b42318; }
@media (prefers-color-scheme: dark) { :root { --page: #14161a; --ink: #e7e6e2; --soft: #9aa1a9; --line: #33373d;
  --card: #1c1f24; --c0: #6aa8ff; --c1: #f2a35e; --c2: #6fd08c; --bad: #ff8a7a; } }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 1120px; padding: 20px 16px 48px; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
h1 { font-size: 22px; margin: 0 0 4px; overflow-wrap: anywhere } h2 { font-size: 17px; margin: 32px 0 6px }
p { margin: 4px 0 10px; max-width: 75ch } .soft { color: var(--soft) } .bad { color: var(--bad); font-weight: 600 }
.facts { display: grid; grid-template-columns: repeat(auto-fill, minmax(150px, 1fr)); gap: 8px; margin: 16px 0 }
.fact, figure { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 10px 12px;
  margin: 0; min-width: 0 }
.fact b { display: block; font-size: 18px; font-variant-numeric: tabular-nums; overflow-wrap: anywhere }
.fact > span, figcaption { color: var(--soft); font-size: 13px }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 340px), 1fr)); gap: 12px;
  align-items: start }
.charts figure { max-width: 560px }
svg { display: block; width: 100%; height: auto } svg text { fill: var(--soft); font-size: 11px }
.wide { overflow-x: auto; border: 1px solid var(--line); border-radius: 8px; background: var(--card) }
table { border-collapse: collapse; width: 100%; font-size: 13px }
th { text-align: left; color: var(--soft); font-weight: 500 }
th, td { padding: 5px 10px; border-bottom: 1px solid var(--line); white-space: nowrap } tr:last-child td { border: 0 }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums }
.experts { display: flex; min-width: 180px; gap: 1px } .experts i { flex: 1; height: 20px; border-radius: 2px;
  background: color-mix(in srgb, var(--c0) calc(var(--s) * 1%), var(--line)); min-width: 2px }
.key { display: inline-block; white-space: nowrap; margin-left: 10px }
.key::before { content: ""; display: inline-block; width: 10px; height: 10px; border-radius: 5px; margin-right: 4px;
  background: var(--k) }
summary { padding: 6px 10px; color: var(--soft); font-size: 13px; cursor: pointer; border-top: 1px solid var(--line) }
@media (max-width: 600px) { th, td { padding: 5px 8px } th { white-space: normal } .experts { min-width: 120px }
  td:first-child, td.long { white-space: normal; overflow-wrap: break-word; min-width: 128px } }
"""


def page(data: dict[str, Any]) -> str:
    """The whole page of what figures() found."""
    text = html.escape
    missing = f"<span class=bad>incomplete: {data['missing_units']} units missing</span>"
    parts = [
        f"<h1>{text(Path(data['store']).name)}</h1>"
        f"<p class=soft>{text(data['store'])} · {text(data['family'])} · "
        f"{'complete' if data['complete'] else missing}</p>",
        _facts(data),
        _stream_part(data["stream"]),
        _routing_part(data["routing"]),
        _half_life_part(data["half_lives"]),
        _extremes_part(data["values"]),
        _throughput_part(data),
        _sizes_part(data["values"]),
    ]
    held = json.dumps(_plain(data)).replace("<", "\\u003c")
    return (
        "<!doctype html>\n<html lang=en><head><meta charset=utf-8>"
        "<meta name=viewport content='width=device-width, initial-scale=1'>"
        f"<title>{text(Path(data['store']).name)} · actdump</title><style>{STYLE}</style></head>\n<body>"
        + "\n".join(p for p in parts if p)
        + f"\n<script type='application/json' id=figures>{held}</script></body></html>\n"
    )


def _plain(x):
    """JSON has no NaN: null."""
    if isinstance(x, dict):
        return {k: _plain(v) for k, v in x.items()}
    if isinstance(x, (list, tuple)):
        return [_plain(v) for v in x]
    return None if isinstance(x, float) and not math.isfinite(x) else x


def _number(x) -> str:
    if x is None or not math.isfinite(x):
        return "–"
    if float(x).is_integer() and abs(x) < 1e7:
        return f"{int(x):,}"
    if 1000 <= abs(x) < 1e7:
        return f"{x:,.0f}"
    return f"{x:.3g}"


def _facts(data) -> str:
    totals, summary = data["totals"], data["summary"] or {}
    bad = sum(v.get("n_nonfinite") or 0 for v in data["values"])
    facts = [
        (f"{totals['n_sequences']:,}", "sequences"),
        (f"{totals['n_tokens']:,}", "tokens"),
        (_size(totals["bytes"]), f"on disk, of {_size(totals['raw_bytes'])} raw"),
        (f"{len(data['values'])}", "values"),
        (f"<span class={'bad' if bad else 'good'}>{bad:,}</span>", "elements not finite"),
    ]
    if summary.get("tokens_per_second"):
        facts.append((_number(round(summary["tokens_per_second"])), "tokens a second, last run"))
    return (
        "<div class=facts>" + "".join(f"<div class=fact><b>{a}</b><span>{b}</span></div>" for a, b in facts) + "</div>"
    )


def _round_step(x: float) -> float:
    """The next number from x on that reads well beside a line."""
    power = 10.0 ** math.floor(math.log10(x))
    return power * next(m for m in (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10, 20) if m * power >= x * (1 - 1e-9))


def _path(path: str) -> str:
    """May be broken after a slash."""
    return html.escape(path).replace("/", "/<wbr>")


def _chart(series: dict[str, list[tuple[float, float]]], caption: str, x_label: str, log: bool | None = None) -> str:
    """Lines with points; 360 units wide, so that on a phone its letters keep their size."""
    points = [(x, y) for line in series.values() for x, y in line if math.isfinite(y)]
    if not points:
        return ""
    ys, xs = [y for _, y in points], [x for x, _ in points]
    log = (min(ys) > 0 and max(ys) / min(ys) > 30) if log is None else log and min(ys) > 0
    scale = math.log10 if log else float
    low, high = (scale(min(ys)), scale(max(ys))) if log else (min(0.0, min(ys)), max(ys))
    if high - low < 1e-12:
        high = low + 1
    if low == 0 and not log:
        high = 3 * _round_step(high / 3)
    x_low, x_high = min(xs), max(xs)
    px = lambda x: 46 + 300 * (x - x_low) / (x_high - x_low) if x_high > x_low else 196  # noqa: E731
    py = lambda y: 160 - 140 * (scale(y) - low) / (high - low)  # noqa: E731
    parts = []
    for i in range(4):
        at = low + (high - low) * i / 3
        y = 160 - 140 * i / 3
        parts.append(
            f"<line x1=46 x2=350 y1={y:.1f} y2={y:.1f} stroke='var(--line)'/>"
            f"<text x=40 y={y + 4:.1f} text-anchor=end>{_number(10**at if log else at)}</text>"
        )
    ticks = sorted(set(xs)) if len(set(xs)) <= 8 else [x_low + (x_high - x_low) * i / 4 for i in range(5)]
    parts += [f"<text x={px(x):.1f} y=176 text-anchor=middle>{_number(x)}</text>" for x in ticks]
    parts.append(f"<text x=198 y=192 text-anchor=middle>{html.escape(x_label)}</text>")
    for i, line in enumerate(series.values()):
        good = [(px(x), py(y)) for x, y in line if math.isfinite(y)]
        colour = f"var(--c{i % 3})"
        parts.append(
            f"<polyline fill=none stroke='{colour}' stroke-width=1.8 points='"
            + " ".join(f"{x:.1f},{y:.1f}" for x, y in good)
            + "'/>"
        )
        parts += [f"<circle cx={x:.1f} cy={y:.1f} r=2.6 fill='{colour}'/>" for x, y in good] if len(good) <= 80 else []
    keys = "".join(
        f"<span class=key style='--k:var(--c{i % 3})'>{html.escape(name)}</span>" for i, name in enumerate(series)
    )
    return (
        f"<figure><figcaption>{html.escape(caption)}{', logarithmic' if log else ''}{keys}</figcaption>"
        f"<svg viewBox='0 0 360 198' role=img aria-label='{html.escape(caption)}'>{''.join(parts)}</svg></figure>"
    )


def _table(head: list[str], rows: list[list[str]], numeric: set[int], long: set[int] = frozenset()) -> str:
    mark = lambda i: " class=n" if i in numeric else " class=long" if i in long else ""  # noqa: E731
    lines = ["<tr>" + "".join(f"<td{mark(i)}>{c}</td>" for i, c in enumerate(r)) + "</tr>" for r in rows]
    top = "<table><thead><tr>" + "".join(f"<th{mark(i)}>{h}</th>" for i, h in enumerate(head)) + "</tr></thead><tbody>"
    rest = (
        f"<details><summary>{len(lines) - LONG} more</summary>{top}{''.join(lines[LONG:])}</tbody></table></details>"
        if len(lines) > LONG
        else ""
    )
    return f"<div class=wide>{top}{''.join(lines[:LONG])}</tbody></table>{rest}</div>"


def _stream_part(stream) -> str:
    if not stream:
        return ""
    several = len({s["capture"] for s in stream}) > 1
    lines: dict[str, dict[str, list]] = {"mean_norm": {}, "variance": {}}
    for s in stream:
        for what in lines:
            name = f"{s['capture']}/{s['value']}" if several else s["value"]
            lines[what].setdefault(name, []).append((s["layer"], s[what]))
    return (
        "<h2>The residual stream by layer</h2><div class=charts>"
        + _chart(lines["mean_norm"], "mean norm of a row", "layer")
        + _chart(lines["variance"], "mean variance of a column", "layer")
        + "</div>"
    )


def _routing_part(routing) -> str:
    if not routing:
        return ""
    rows = []
    for r in routing:
        load, n = r.get("load", []), r["n_experts"]
        top = max(load, default=0) or 1
        cells = "".join(
            f"<i style='--s:{100 * x / top:.0f}' title='expert {i}: {100 * x:.2f} %'></i>" for i, x in enumerate(load)
        )
        rows.append(
            [
                html.escape(f"{r['capture']}, layer {r['layer']}"),
                f"<div class=experts>{cells}</div>" if load else "–",
                f"{100 * min(load):.1f} to {100 * max(load):.1f} %" if load else "–",
                _number(r.get("load_entropy")),
                _number(r.get("router_entropy")),
                f"{math.log2(n):.3g}",
                f"{max(r.get('load_rows', 0), r.get('router_rows', 0)):,}",
            ]
        )
    return (
        "<h2>Routing</h2><p class=soft>Share of the routing slots that each expert took, strongest the most; "
        "entropies in bits: of these shares, and the mean over rows of softmax(router_logits).</p>"
        + _table(
            [
                "layer",
                "experts, 0 at the left",
                "least and most",
                "load entropy",
                "router entropy",
                "at most",
                "rows read",
            ],
            rows,
            {2, 3, 4, 5, 6},
        )
    )


def _half_life_part(lives) -> str:
    if not lives:
        return ""
    lines = {
        name: [(s["layer"], s[key]) for s in lives]
        for name, key in (("median state", "p50"), ("longest tenth", "p90"), ("shortest tenth", "p10"))
    }
    rows = [
        [
            html.escape(f"{s['capture']}, layer {s['layer']}"),
            f"{s['states']:,}",
            *(_number(s[k]) for k in ("p10", "p50", "p90", "max")),
        ]
        for s in lives
    ]
    return (
        "<h2>How long states remember</h2><p class=soft>Half-lives in tokens: ln 2 over the mean log decay of each "
        "state.</p><div class=charts>"
        + _chart(lines, "half-life in tokens", "layer", log=True)
        + _table(["layer", "states", "10 %", "median", "90 %", "longest"], rows, {1, 2, 3, 4, 5})
        + "</div>"
    )


def _where(place) -> str:
    words = [f"document {place['document']:,}"]
    if "position" in place:
        words += [f"position {place['position']:,}", f"token {place['input_ids']:,}"]
    return ", ".join([*words, f"row {place['row']:,}"])


def _extremes_part(values) -> str:
    rows = []
    for v in sorted((v for v in values if "largest" in v), key=lambda v: -(v["max_abs"] or 0)):
        whole = v["scanned_rows"] == v["shape"][0]
        place = _where(v["largest"]) + (f", index {v['largest']['index']}" if v["largest"]["index"] else "")
        bad = _number(v["n_nonfinite"])
        if v["n_nonfinite"] and "first_nonfinite" in v:
            bad = f"<span class=bad>{v['n_nonfinite']:,}</span>, first at {_where(v['first_nonfinite'])}"
        part = "" if whole else f" ({_number(v['largest']['magnitude'])} in {v['scanned_rows']:,} rows read)"
        rows.append([_path(v["path"]), _number(v["max_abs"]), place + part, bad, _number(v["n_overflow"])])
    if not rows:
        return ""
    return "<h2>Largest and non-finite elements</h2>" + _table(
        ["value", "largest magnitude", "where", "not finite", "overflowed"], rows, {1, 4}, {2, 3}
    )


def _throughput_part(data) -> str:
    line = [(t["hours"], t["tokens_per_second"]) for t in data["throughput"]]
    if not line:
        return ""
    unit, factor = ("hours", 1) if line[-1][0] >= 1 else ("minutes", 60)
    chart = _chart(
        {"tokens a second": [(x * factor, y) for x, y in line]}, "by the times of the segment files", unit, False
    )
    return f"<h2>Throughput over the job</h2><div class=charts>{chart}</div>"


def _sizes_part(values) -> str:
    rows = [
        [
            _path(v["path"]),
            f"{v['shape'][0]:,}",
            html.escape(" × ".join(map(str, v["shape"][1:])) or "–"),
            v["dtype"],
            _size(v["bytes"]),
            _size(v["stored_bytes"]),
            f"{v['bytes'] / v['stored_bytes']:.2f}" if v["stored_bytes"] else "–",
        ]
        for v in values
    ]
    return "<h2>Rows and bytes by value</h2>" + _table(
        ["value", "rows", "shape", "dtype", "raw", "stored", "ratio"], rows, {1, 2, 4, 5, 6}
    )


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m actdump.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("store")
    parser.add_argument("-o", "--output", help="default: report.html in the working folder")
    parser.add_argument("--scan-bytes", type=float, default=SCAN_BYTES, help="read of a value at most (default 4e9)")
    options = parser.parse_args(arguments)
    output = Path(options.output or "report.html")
    try:
        with actdump.open(options.store) as store:
            text = page(figures(store, options.scan_bytes))
        output.write_text(text, "utf-8")
    except (StoreError, OSError) as error:
        print(f"actdump.report: {error}", file=sys.stderr)
        return 3
    print(output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
