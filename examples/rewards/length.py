"""A reward in Python: the shorter the answer, the better, down to -1 at 200 words; an empty one has no score."""

import json
import sys

for line in sys.stdin:
    sample = json.loads(line)
    words = len(sample["response"].split())
    score = -min(words / 200, 1) if words else None
    print(json.dumps({"id": sample["id"], "score": score}), flush=True)
