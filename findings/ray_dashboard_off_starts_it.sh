#!/usr/bin/env bash
# ray 2.55.1, init(include_dashboard=False, log_to_driver=False): the processes of the dashboard and of the log monitor are
# started all the same, on each start some 1.3 CPU seconds. Expected: neither, as nobody can open the one or gets lines of
# the other. Flower 1.41's simulation passes the first, and its command line takes the second: neither shortens a start.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet ray==2.55.1 psutil==7.2.2
cd "$folder"
venv/bin/python - <<'PY'
import psutil
import ray

ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
home = ray._private.worker._global_node.get_session_dir_path()
lines = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
started = {name for line in lines if home in line for name in ("dashboard.py", "log_monitor.py") if f"/{name}" in line}
print("ray", ray.__version__, "started", sorted(started))
ray.shutdown()
assert started == {"dashboard.py", "log_monitor.py"}, "what is switched off is not started: mended"
PY
