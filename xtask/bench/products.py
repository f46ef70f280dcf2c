"""The rate at which other libraries do the matrix products of one `dpo-cached` step of the training benchmark, alone.

usage: products.py [rounds]

For each linear of the model (hidden 512, 8 layers, MLP 1376, 4096 words) on the step's 2560 rows: the forward product and the
two of the backward pass. Prints GFLOP/s over all of them, the best round of each library: torch (MKL), numpy (OpenBLAS), and
blis where it is installed; two threads, but one for blis, whose figure is doubled.
"""
import os, sys, time

os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "2"
import numpy as np
import torch

torch.set_num_threads(2)
rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
ROWS = 8 * 64 + 16 * 128
# Rows, inputs, outputs, how many in the model.
LINEARS = [(ROWS, 512, 512, 16), (ROWS, 512, 256, 16), (ROWS, 512, 1376, 16), (ROWS, 1376, 512, 8), (2048, 512, 4096, 1)]


def run(name, make, product, factor=1):
    best = 0.0
    for _ in range(rounds):
        work = seconds = 0.0
        for m, k, n, count in LINEARS:
            x, w, g = make(m, k), make(n, k), make(m, n)
            for _ in range(2):
                start = time.perf_counter()
                product(x, w.T), product(g, w), product(g.T, x)
                took = time.perf_counter() - start
            work, seconds = work + count * 6 * m * k * n, seconds + count * took
        best = max(best, factor * work / seconds / 1e9)
    print(f"{name}: {best:.0f} GFLOP/s")


run("torch", torch.randn, torch.matmul)
run("numpy", lambda *shape: np.random.randn(*shape).astype(np.float32), np.matmul)
try:
    import blis.py
    run("blis", lambda *shape: np.random.randn(*shape).astype(np.float32),
        lambda a, b: blis.py.gemm(np.ascontiguousarray(a), np.ascontiguousarray(b)), factor=2)
except ImportError:
    pass
