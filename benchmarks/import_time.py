"""What `import narrowgauge` costs beyond torch's own import.

    python benchmarks/import_time.py [--repeats 7] [--json]

Fresh interpreters take turns: one imports torch and numpy, the other narrowgauge as well.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

import common

ALLOWED_S = 0.5
IMPORTS = {"torch": "import torch, numpy", "torch and narrowgauge": "import torch, numpy, narrowgauge"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", action="store_true", help="write a file under benchmarks/results/")
    arguments = parser.parse_args()
    runs = {
        name: lambda code=code: subprocess.run([sys.executable, "-c", code], check=True)
        for name, code in IMPORTS.items()
    }
    times = common.interleaved(runs, arguments.repeats, warmup=1)
    middle = common.medians(times)
    beyond_s = middle["torch and narrowgauge"] - middle["torch"]
    passed = beyond_s < ALLOWED_S
    print(
        f"import torch {middle['torch']:.2f} s, narrowgauge {beyond_s:+.3f} s beyond it  {'ok' if passed else 'MISSED'}"
    )
    if arguments.json:
        figures = {"import narrowgauge beyond torch, seconds": {"measured": beyond_s, "at_most": ALLOWED_S}}
        print(common.write_result("import_time", {"figures": figures, "repeats_s": times}))
    return 0 if passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
