#!/usr/bin/env python3
"""A sparse autoencoder, trained with the package dictionary-learning straight from a store.

    pip install dictionary-learning
    python python/examples/sae.py out/sample-mamba [--value residuals/layers/3/layer_output] [--steps 400]

The trainer is given batches as the loader reads them, scaled to a mean norm of sqrt(d) by the store's statistics; no
activation is copied to another file. Prints the share of variance that the autoencoder leaves unexplained on rows of
documents that it was not trained on, beside that of one that was not trained."""

import argparse
import json
import os

import numpy as np
import torch

import actdump
from actdump.training import Loader

os.environ.setdefault("WANDB_MODE", "disabled")


def endless(loader, value):
    """Batches of one tensor, epoch after epoch, each in an order of its own."""
    while True:
        for batch in loader:
            yield batch[value]


@torch.no_grad()
def unexplained(autoencoder, loader, value):
    """Squared error over the variance around the mean row."""
    x = torch.cat([batch[value] for batch in loader])
    return ((x - autoencoder(x)).square().sum() / (x - x.mean(0)).square().sum()).item()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store")
    parser.add_argument("--value", default="residuals/layers/3/layer_output")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--features", type=int, default=1024)
    parser.add_argument("--k", type=int, default=16, help="features a row may use")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--save", help="folder for the trained autoencoder")
    options = parser.parse_args()
    from dictionary_learning.trainers.top_k import AutoEncoderTopK, TopKTrainer
    from dictionary_learning.training import trainSAE

    store = actdump.open(options.store)
    value = options.value
    width = store[value].shape[1]
    rows = store[value].capture.rows()
    held_out = np.isin(rows["document"], np.unique(rows["document"])[::5])
    usable = rows["position"] > 0  # the first position of a sequence has a norm of its own kind
    data = dict(values=[value], seed=options.seed, normalise="norm")
    train = Loader(store, batch_size=options.batch_size, where=usable & ~held_out, num_workers=options.workers, **data)
    test = Loader(store, batch_size=4096, where=usable & held_out, **data)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    folder = options.save or os.path.join(options.store, os.pardir, "sae")
    config = dict(
        trainer=TopKTrainer,
        steps=options.steps,
        activation_dim=width,
        dict_size=options.features,
        k=options.k,
        layer=store[value].layer,
        lm_name=store.info["model"]["family"],
        lr=1e-3,
        device=device,
        warmup_steps=options.steps // 20,
        decay_start=options.steps * 4 // 5,
        seed=options.seed,
    )
    trainSAE(endless(train, value), [config], steps=options.steps, save_dir=folder, device=device)

    torch.manual_seed(options.seed)
    untrained = AutoEncoderTopK(width, options.features, options.k)
    trained = AutoEncoderTopK(width, options.features, options.k)
    trained.load_state_dict(torch.load(os.path.join(folder, "trainer_0", "ae.pt")))
    print(
        json.dumps(
            {
                "value": value,
                "unexplained": unexplained(trained, test, value),
                "unexplained_untrained": unexplained(untrained, test, value),
                "saved": folder,
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
