"""The PyTorch side of the training benchmark: a plain loop over transformers' model, fp32, on the rows of data.py.

usage: torch_train.py MODEL_DIR DATA.json full|variable|dpo-live|dpo-cached [repeats]

full      8 rows of 256 tokens a step, loss on every token
variable  the same loop on rows of 16 to 256 tokens, right-padded to the longest of the step
dpo-*     8 pairs a step, 64 prompt and 128 answer tokens; the reference runs in every step, or once before
Prints one JSON line.
"""
import json, os, resource, statistics, sys, time

os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "2"
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

PROMPT = 64
model_dir, data, mode = sys.argv[1:4]
repeats = int(sys.argv[4]) if len(sys.argv) > 4 else 3
torch.set_num_threads(2)
data = json.load(open(data))
load = lambda: AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="sdpa")
model = load().train()
opt = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.01)


def update(loss):
    loss.backward()
    opt.step()
    opt.zero_grad(set_to_none=True)


def padded(rows):
    width = max(map(len, rows))
    x = torch.zeros(len(rows), width, dtype=torch.long)
    mask, labels = torch.zeros_like(x), torch.full_like(x, -100)
    for i, row in enumerate(rows):
        x[i, :len(row)] = labels[i, :len(row)] = torch.tensor(row)
        mask[i, :len(row)] = 1
    return dict(input_ids=x, attention_mask=mask, labels=labels)


if mode == "full":
    steps = [dict(input_ids=torch.tensor(r), labels=torch.tensor(r)) for r in data["full"]]
    step = lambda batch: update(model(**batch, use_cache=False).loss)
    tokens = sum(len(r) for rows in data["full"] for r in rows)
elif mode == "variable":
    steps = [padded(rows) for rows in data["variable"]]
    step = lambda batch: update(model(**batch, use_cache=False).loss)
    tokens = sum(len(r) for rows in data["variable"] for r in rows)
else:
    reference = load().eval().requires_grad_(False)

    def logps(m, x):
        logits = m(input_ids=x, use_cache=False, logits_to_keep=x.shape[1] - PROMPT + 1).logits[:, :-1]
        return logits.log_softmax(-1).gather(-1, x[:, PROMPT:, None])[..., 0].sum(1)

    @torch.no_grad()
    def reference_logps(x):
        return logps(reference, x)

    rows = [torch.tensor(r) for r in data["pairs"]]
    steps = [(x, reference_logps(x) if mode == "dpo-cached" else None) for x in rows]

    def step(batch):
        x, known = batch
        r = reference_logps(x) if known is None else known
        chosen, rejected = (logps(model, x) - r).chunk(2)
        update(-F.logsigmoid(0.1 * (chosen - rejected)).mean())

    tokens = sum(x.numel() for x in rows)

seconds, cpu = [], []
for _ in range(repeats + 1):
    wall, process = time.perf_counter(), time.process_time()
    for batch in steps:
        step(batch)
    seconds.append(time.perf_counter() - wall)
    cpu.append(time.process_time() - process)
median = statistics.median(seconds[1:])
print(json.dumps(dict(bench="torch", mode=mode, median_s=median, cpu_median_s=statistics.median(cpu[1:]), secs=seconds[1:],
                      tok_s=tokens / median, s_per_step=median / len(steps),
                      peak_rss_mib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)))
