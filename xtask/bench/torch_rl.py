"""One iteration of TRL's GRPO or RLOO trainer, or of a plain PPO loop, on fp32 with two threads: prints one JSON line.

torch_rl.py MODEL_DIR grpo|rloo|ppo REPEATS short|long

MODEL_DIR holds a tokenizer too. `short`: 8 prompts of 64 tokens with 4 answers of 128 each; `long`: 4 prompts of 512 with 8 answers
of log-normal lengths, ended by the end token at the same lengths as in bench_rl.rs.
"""
import json
import os
import resource
import statistics
import sys
import time

os.environ.update(OMP_NUM_THREADS="2", MKL_NUM_THREADS="2", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

import torch
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer, LogitsProcessor, LogitsProcessorList, TrainerCallback

MODEL, ALGO, REPEATS, CASE = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
PROMPTS, GENS, PROMPT, NEW = (4, 8, 512, 256) if CASE == "long" else (8, 4, 64, 128)
LENGTHS = [64, 81, 51, 31, 44, 29, 67, 187, 43, 39, 95, 85, 70, 30, 63, 112, 22, 44, 14, 23, 15, 53, 23, 80, 73, 55, 9, 42, 62, 70, 19, 44]
B = PROMPTS * GENS

torch.set_num_threads(2)
torch.manual_seed(1234)


def load():
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32, attn_implementation="sdpa")


class Ends(LogitsProcessor):
    """The end token at each row's length, and never before."""

    def __init__(self, eos, prompt, lengths):
        self.eos, self.prompt, self.lengths = eos, prompt, torch.tensor(lengths)

    def __call__(self, ids, scores):
        drawn = ids.shape[1] - self.prompt
        scores[:, self.eos] = float("-inf")
        ends = (self.lengths[: ids.shape[0]] - 1) <= drawn
        scores[ends] = float("-inf")
        scores[ends, self.eos] = 0.0
        return scores


def lengths():
    return LENGTHS if CASE == "long" else [NEW] * B


phases = {"generate": 0.0, "logprob": 0.0, "rollout": 0.0}


def timed(owner, name, key, only=lambda: True):
    inner = getattr(owner, name)

    def call(*args, **kwargs):
        start = time.perf_counter()
        try:
            return inner(*args, **kwargs)
        finally:
            if only():
                phases[key] += time.perf_counter() - start

    setattr(owner, name, call)


def report(seconds, parts):
    median = lambda values: round(statistics.median(values), 3)
    line = {"algo": ALGO, "case": CASE, "s_per_iter": median(seconds)}
    line.update({key: median([part[key] for part in parts]) for key in parts[0]})
    line["peak_rss_mib"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    print(json.dumps(line))


def with_trl():
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.padding_side = "left"
    texts = []
    ids = torch.randint(300, 4096, (PROMPTS * (REPEATS + 1), PROMPT + 64)).tolist()
    for row in ids:
        # A text whose tokens are exactly as many as asked for.
        text = tokenizer.decode(row[:PROMPT])
        for _ in range(40):
            got = tokenizer(text, add_special_tokens=False)["input_ids"]
            if len(got) == PROMPT:
                break
            text = tokenizer.decode((got + row)[:PROMPT])
        texts.append(text)
    config, trainer = (GRPOConfig, GRPOTrainer) if ALGO == "grpo" else (RLOOConfig, RLOOTrainer)
    settings = config(
        output_dir="/tmp/trl", per_device_train_batch_size=B, gradient_accumulation_steps=1, num_generations=GENS, max_completion_length=NEW, beta=0.04,
        temperature=1.0, top_k=0, top_p=1.0, learning_rate=1e-6, max_steps=REPEATS + 1, report_to=[], save_strategy="no", logging_steps=1000, use_cpu=True,
        bf16=False, fp16=False, gradient_checkpointing=False, disable_tqdm=True, num_iterations=1, shuffle_dataset=False,
    )
    # Counts sevens in the tokens, as bench_rl.rs does.
    reward = lambda completions, completion_ids, **_: [float(sum(token % 7 == 0 for token in row)) for row in completion_ids]
    run = trainer(model=load(), reward_funcs=reward, args=settings, train_dataset=Dataset.from_dict({"prompt": texts}), processing_class=tokenizer)
    inner = run.model.generate

    def generate(*args, **kwargs):
        ids = kwargs.get("input_ids", args[0] if args else None)
        kwargs["logits_processor"] = LogitsProcessorList([Ends(tokenizer.eos_token_id, ids.shape[1], lengths())])
        return inner(*args, **kwargs)

    run.model.generate = generate
    timed(run, "_generate_single_turn", "generate")
    timed(run, "_generate_and_score_completions", "rollout")
    timed(run, "_get_per_token_logps_and_entropies", "logprob", lambda: not torch.is_grad_enabled())
    seconds, parts = [], []

    class Clock(TrainerCallback):
        last = 0.0

        def on_train_begin(self, *args, **kwargs):
            Clock.last = time.perf_counter()

        def on_step_end(self, *args, **kwargs):
            now = time.perf_counter()
            seconds.append(now - Clock.last)
            parts.append({"generate_s": phases["generate"], "logprob_s": phases["logprob"], "learn_s": now - Clock.last - phases["rollout"]})
            phases.update(generate=0.0, logprob=0.0, rollout=0.0)
            Clock.last = now

    run.add_callback(Clock())
    run.train()
    report(seconds[1:], parts[1:])


def by_hand():
    """TRL has no PPO trainer at present: a plain loop of the same work."""
    policy, reference = load(), load().eval()
    critic = AutoModelForTokenClassification.from_pretrained(MODEL, num_labels=1, dtype=torch.float32)
    optimizer = torch.optim.AdamW([*policy.parameters(), *critic.parameters()], lr=1e-6)
    vocab, eos = policy.config.vocab_size, 2
    seconds, parts = [], []
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        ids = torch.randint(3, vocab, (PROMPTS, PROMPT)).repeat_interleave(GENS, 0)
        policy.eval()
        with torch.no_grad():
            ends = LogitsProcessorList([Ends(eos, PROMPT, lengths())])
            x = policy.generate(input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
                                max_new_tokens=max(lengths()), eos_token_id=eos, pad_token_id=0, logits_processor=ends)
            drawn = time.perf_counter()
            new = x.shape[1] - PROMPT
            mask = (torch.arange(new)[None] < torch.tensor(lengths())[:, None]).float()

            def logps(model):
                logits = model(input_ids=x, use_cache=False, logits_to_keep=new + 1).logits[:, :-1]
                return logits.log_softmax(-1).gather(-1, x[:, PROMPT:, None])[..., 0]

            def values():
                return critic(input_ids=x, use_cache=False).logits[:, PROMPT - 1 : -1, 0]

            old, ref, v = logps(policy), logps(reference), values()
            rewards = -0.05 * (old - ref) * mask
            last = mask.sum(1).long() - 1
            rewards[torch.arange(B), last] += ((x[:, PROMPT:] % 7 == 0) * mask).sum(1)
            advantages, carry = torch.zeros_like(v), 0.0
            for t in reversed(range(new)):
                after = v[:, t + 1] * mask[:, t + 1] if t + 1 < new else 0.0
                carry = (rewards[:, t] + after - v[:, t] + 0.95 * carry) * mask[:, t]
                advantages[:, t] = carry
            returns = advantages + v
            advantages = (advantages - advantages[mask > 0].mean()) / (advantages[mask > 0].std() + 1e-8)
        judged = time.perf_counter()
        policy.train()
        ratio = torch.exp(logps(policy) - old)
        loss = (torch.max(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2)) * mask).sum() / mask.sum()
        now = values()
        clipped = torch.max(torch.min(now, v + 0.2), v - 0.2)
        loss = loss + 0.1 * 0.5 * (torch.max((now - returns) ** 2, (clipped - returns) ** 2) * mask).sum() / mask.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        end = time.perf_counter()
        seconds.append(end - start)
        parts.append({"generate_s": drawn - start, "logprob_s": judged - drawn, "learn_s": end - judged})
    report(seconds[1:], parts[1:])


by_hand() if ALGO == "ppo" else with_trl()
