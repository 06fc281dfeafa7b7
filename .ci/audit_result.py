"""The result of `pip-audit -f json`. Exit code 1: a vulnerability; 3: packages were not audited."""

import json
import sys
from pathlib import Path

file = Path(sys.argv[1])
text = file.read_text(encoding="utf-8") if file.exists() else ""
packages = json.loads(text)["dependencies"] if text else []
audited = [package for package in packages if "skip_reason" not in package]
vulnerabilities = [
    f"{package['name']} {package['version']}: {vulnerability['id']}"
    for package in audited
    for vulnerability in package["vulns"]
]
print(f"pip-audit: {len(audited)} of {len(packages)} packages audited")
if vulnerabilities:
    sys.exit("\n".join(vulnerabilities))
sys.exit(0 if audited and len(audited) == len(packages) else 3)
