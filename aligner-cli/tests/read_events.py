"""Reads a run's event files with TensorBoard's own reader and compares them with metrics.jsonl.

By hand, since it needs the Python package `tensorboard`:

    python aligner-cli/tests/read_events.py runs/demo_dpo
"""

import json
import math
import sys
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def main(run):
    events = EventAccumulator(str(run), size_guidance={"scalars": 0})
    events.Reload()
    compared = 0
    for line in (run / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        step = record.pop("step")
        for name, value in record.items():
            shown = [event.value for event in events.Scalars(name) if event.step == step]
            assert len(shown) == 1, f"{name} at step {step}: {len(shown)} events"
            assert math.isclose(shown[0], value, rel_tol=1e-6, abs_tol=1e-30), f"{name} at step {step}: {shown[0]} for {value}"
            compared += 1
    print(f"{run}: {compared} values in {len(events.Tags()['scalars'])} scalars agree")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
