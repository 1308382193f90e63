#!/usr/bin/env python3
"""A linear probe: does the residual stream of a token say which token came before it?

    python python/examples/probe.py out/sample-mamba [--value residuals/layers/3/layer_output] [--epochs 3]

Trains a softmax on rows of four fifths of the documents and prints its cross-entropy on the others, beside that of a
control that is trained in the same way on the same rows with their labels shuffled."""

import argparse
import json

import numpy as np
import torch

import actdump
from actdump.training import Loader


def previous_tokens(capture: actdump.Capture) -> np.ndarray:
    """For each row the token before it in its sequence; -1 where the capture has no row of it."""
    rows = capture.rows()
    follows = np.zeros(len(capture), bool)
    follows[1:] = (np.diff(rows["sequence"]) == 0) & (np.diff(rows["position"]) == 1)
    labels = np.full(len(capture), -1, np.int64)
    labels[1:][follows[1:]] = rows["input_ids"][:-1][follows[1:]]
    return labels


def train(store, value, labels, where, n_classes, epochs, seed=0, lr=3e-3):
    torch.manual_seed(seed)
    probe = torch.nn.Linear(store[value].shape[1], n_classes)
    optimizer = torch.optim.Adam(probe.parameters(), lr=lr)
    loader = Loader(store, [value], batch_size=512, seed=seed, where=where, tables=True, normalise="norm")
    for _ in range(epochs):
        for batch in loader:
            loss = torch.nn.functional.cross_entropy(probe(batch[value]), labels[batch["row"]])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return probe


@torch.no_grad()
def evaluate(store, value, labels, where, probe):
    loader = Loader(store, [value], batch_size=4096, where=where, tables=True, normalise="norm", shuffle=False)
    total, right = 0.0, 0
    for batch in loader:
        scores, wanted = probe(batch[value]), labels[batch["row"]]
        total += torch.nn.functional.cross_entropy(scores, wanted, reduction="sum").item()
        right += int((scores.argmax(1) == wanted).sum())
    return {"cross_entropy": total / len(where), "accuracy": right / len(where)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store")
    parser.add_argument("--value", default="residuals/layers/3/layer_output")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    store = actdump.open(options.store)
    capture = store[options.value].capture
    labels, documents = previous_tokens(capture), capture.rows()["document"]
    numbers = np.unique(documents)
    held_out = np.isin(documents, numbers[::5])
    train_rows, test_rows = (np.flatnonzero((labels >= 0) & mask) for mask in (~held_out, held_out))
    n_classes = store.info["model"]["vocab_size"]
    shuffled = labels.copy()
    shuffled[train_rows] = np.random.default_rng(options.seed).permutation(labels[train_rows])

    wanted = torch.from_numpy(labels)
    results = {}
    for name, given in (("probe", wanted), ("shuffled labels", torch.from_numpy(shuffled))):
        probe = train(store, options.value, given, train_rows, n_classes, options.epochs, options.seed)
        results[name] = evaluate(store, options.value, wanted, test_rows, probe)
    print(
        json.dumps(
            {"value": options.value, "train_rows": len(train_rows), "test_rows": len(test_rows), **results}, indent=1
        )
    )


if __name__ == "__main__":
    main()
