"""The report: its figures are NumPy's on the same store, it needs nothing from elsewhere, and a browser shows it."""

import html.parser
import json
import re
import shutil
import subprocess

import h5py
import numpy as np
import pytest

import harness
from actdump.report import main


def made(store, folder, *options):
    path = folder / "report.html"
    assert main([str(store), "-o", str(path), *options]) == 0
    text = path.read_text()
    held = re.search(r"<script type='application/json' id=figures>(.*?)</script>", text, re.DOTALL)
    return text, json.loads(held[1])


@pytest.fixture(scope="module", params=["mamba", "jamba", "laguna", "bamba"])
def reported(request, stores, tmp_path_factory):
    store = stores(request.param)
    text, found = made(store, tmp_path_factory.mktemp("report"))
    return store, text, found, harness.read_values(store)


def test_the_residual_stream(reported):
    _, _, found, values = reported
    n_layers = len({p.split("/")[1] for p in values if p.startswith("layers/")})
    names = [("layer_input", n_layers), ("layer_output", n_layers)]
    for name, wanted in names:
        entries = [s for s in found["stream"] if s["value"] == name]
        assert [s["layer"] for s in entries] == list(range(wanted))
        for s in entries:
            x = values[f"layers/{s['layer']}/{name}"].astype(np.float64)
            assert s["mean_norm"] == pytest.approx(np.linalg.norm(x, axis=1).mean(), rel=1e-6)
            assert s["variance"] == pytest.approx(x.var(0).mean(), rel=1e-6)


def test_the_largest_elements_and_their_places(reported):
    store, _, found, values = reported
    rows = {k: values[f"rows/{k}"] for k in ("sequence", "position", "input_ids")}
    for v in found["values"]:
        x = values[v["path"].removeprefix("everything/")]
        if x.dtype.kind != "f":
            assert "largest" not in v
            continue
        finite = np.where(np.isfinite(x), np.abs(x), -1.0)
        assert v["max_abs"] == pytest.approx(finite.max(), rel=1e-6) and v["scanned_rows"] == len(x)
        place = v["largest"]
        assert abs(x[(place["row"], *place["index"])]) == pytest.approx(finite.max(), rel=1e-6), v["path"]
        if "position" in place:
            assert all(place[k] == rows[k][place["row"]] for k in rows)
        assert v["n_nonfinite"] == 0 and v["bytes"] == x.size * {"float32": 4, "float16": 2, "bfloat16": 2}[v["dtype"]]


def test_routing(reported):
    store, text, found, values = reported
    layers = [p.split("/")[1] for p in values if p.endswith("/mlp/expert_indices")]
    assert sorted(r["layer"] for r in found["routing"]) == sorted(map(int, layers))
    assert ("<h2>Routing</h2>" in text) == bool(layers)
    for r in found["routing"]:
        chosen = values[f"layers/{r['layer']}/mlp/expert_indices"]
        logits = values[f"layers/{r['layer']}/mlp/router_logits"].astype(np.float64)
        share = np.bincount(chosen.ravel(), minlength=logits.shape[1]) / chosen.size
        np.testing.assert_allclose(r["load"], share)
        some = share[share > 0]
        assert r["load_entropy"] == pytest.approx(-(some * np.log2(some)).sum())
        p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        assert r["router_entropy"] == pytest.approx(-(p * np.log2(p)).sum(1).mean())


def test_half_lives(reported):
    _, text, found, values = reported
    layers = [p.split("/")[1] for p in values if p.endswith("/linear_attn/decays")]
    assert [s["layer"] for s in found["half_lives"]] == sorted(map(int, layers))
    assert ("How long states remember" in text) == bool(layers)
    for s in found["half_lives"]:
        decay = values[f"layers/{s['layer']}/linear_attn/decays"].astype(np.float64)
        lives = np.log(2) / -decay.reshape(len(decay), -1).mean(0)
        for q in (10, 50, 90):
            assert s[f"p{q}"] == pytest.approx(np.percentile(lives, q), rel=1e-5)


def test_stored_bytes(reported):
    store, _, found, _ = reported
    for v in found["values"]:
        total = 0
        for segment in harness.segments(store):
            with h5py.File(segment) as file:
                total += file[v["path"]].id.get_storage_size()
        assert v["stored_bytes"] == total


def test_nothing_from_elsewhere_and_well_formed(reported):
    text = reported[1]
    assert not re.search(r"(src|href)=|url\(|@import|https?://", text)
    depth = []

    class Balance(html.parser.HTMLParser):
        def handle_starttag(self, tag, attrs):
            if tag not in ("meta", "wbr"):
                depth.append(tag)

        def handle_startendtag(self, tag, attrs):
            assert tag in ("line", "circle", "polyline")

        def handle_endtag(self, tag):
            assert depth.pop() == tag

    Balance().feed(text)
    assert not depth


def test_places_of_what_is_not_finite(tmp_path):
    """A checkpoint with one embedding of infinity: the page counts it and names its token."""

    def spoil(tensors):
        name = next(n for n in tensors if "embed" in n)
        array = tensors[name][1].copy()
        array[40, 3] = np.inf
        tensors[name] = (tensors[name][0], array)

    checkpoint = harness.copy_checkpoint("mamba", tmp_path / "checkpoint", tensors=spoil)
    corpus = harness.write_corpus(tmp_path / "corpus", [[1, 2, 3], [5, 40, 7]])
    job, store = harness.make_job(
        tmp_path, checkpoint=checkpoint, corpus=corpus, captures={"c": {"values": ["token_embeddings"]}}
    )
    harness.actdump("run", job).expect(harness.OK)
    text, found = made(store, tmp_path)
    value = found["values"][0]
    assert value["n_nonfinite"] == 1
    assert value["first_nonfinite"] == {"row": 4, "sequence": 1, "document": 1, "position": 1, "input_ids": 40}
    assert "first at document 1, position 1, token 40" in text


def test_a_scan_of_part_says_so(stores, tmp_path):
    text, found = made(stores("jamba"), tmp_path, "--scan-bytes", "1")
    assert all(v["scanned_rows"] < v["shape"][0] for v in found["values"] if v["shape"][0] == 38 and "largest" in v)
    assert "rows read)" in text


def test_what_is_wrong_is_said(tmp_path, capsys):
    assert main([str(tmp_path), "-o", str(tmp_path / "r.html")]) == 3
    assert "store.json" in capsys.readouterr().err and not (tmp_path / "r.html").exists()


@pytest.mark.parametrize("scheme,width", [("light", 390), ("light", 1280), ("dark", 390), ("dark", 1280)])
def test_a_browser_shows_it(stores, tmp_path, scheme, width):
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if not chromium:
        pytest.skip("no chromium is installed: the page is not looked at")
    made(stores("jamba"), tmp_path)
    probe = (
        "<script>addEventListener('load', () => document.title = [document.documentElement.scrollWidth, innerWidth, "
        "getComputedStyle(document.body).backgroundColor, document.querySelectorAll('svg').length].join('|'))</script>"
    )
    page = tmp_path / "report.html"
    page.write_text(page.read_text().replace("</body>", probe + "</body>"))
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--user-data-dir={tmp_path / 'profile'}",
        f"--window-size={width},1600",
    ] + (["--blink-settings=preferredColorScheme=0"] if scheme == "dark" else [])
    shot = tmp_path / "page.png"
    subprocess.run(
        [chromium, *options, f"--screenshot={shot}", page.as_uri()], check=True, capture_output=True, timeout=100
    )
    assert shot.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and shot.stat().st_size > 20_000
    dom = subprocess.run(
        [chromium, *options, "--dump-dom", page.as_uri()], check=True, capture_output=True, text=True, timeout=100
    ).stdout
    shown, inner, background, charts = re.search(r"<title>([^<]*)</title>", dom)[1].split("|")
    assert int(shown) <= int(inner), "the page is wider than the window"
    assert background == {"light": "rgb(251, 250, 247)", "dark": "rgb(20, 22, 26)"}[scheme]
    assert int(charts) == 3
