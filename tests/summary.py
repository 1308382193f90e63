"""Sums up ctest's JUnit files: the reasons of what was skipped, the names of what failed, and the counts as the last line.

Usage: summary.py RESULT.xml ...; exits 1 where a test failed or none ran."""
import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

PYTEST_SKIP = re.compile(r"^SKIPPED \[\d+\] (.*)$", re.MULTILINE)


def main(files):
    passed, failed, skipped, reasons = 0, [], 0, []
    for file in files:
        stage = Path(file).stem
        for case in ElementTree.parse(file).iter("testcase"):
            name, status = f"{stage}: {case.get('name')}", case.get("status")
            output = case.findtext("system-out") or ""
            reasons += [f"{name}: {reason}" for reason in PYTEST_SKIP.findall(output)]
            if status == "run":
                passed += 1
            elif status in ("notrun", "disabled"):
                skipped += 1
                if not PYTEST_SKIP.search(output):
                    lines = output.strip().splitlines() or ["no reason given"]
                    reasons.append(f"{name}: {lines[-1]}")
            else:
                failed.append(name)
    for title, lines in (("skipped", reasons), ("failed", failed)):
        if lines:
            print(f"{title}:", *lines, sep="\n  ")
    print(f"{passed} passed, {len(failed)} failed, {skipped} skipped")
    return 0 if passed and not failed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
