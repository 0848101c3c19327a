"""Let Prometheus scrape a live router, and run every query of its dashboard and the alerts.

    python scripts/show_router.py [--seconds 60] [--out docs/grafana/router.png]

Ends with 1 if a query of docs/grafana/router.json returns no data, or an alert cannot be evaluated;
draws the dashboard's panels. The load is conversations with three engines without a model, of which
one is killed and started again on the way. Needs `prometheus` (Debian's package, say) and
matplotlib.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from render_dashboard import Prometheus, Span, draw, queries_without_data
from show_metrics import DATA_PATIENCE_S, GRAFANA, SCRAPE_S, check_alerts, prometheus_scraping

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from router_load import Conversations, Engines
from router_process import RouterProcess

DASHBOARD = GRAFANA / "router.json"
NUM_ENGINES, NUM_CONVERSATIONS = 3, 9


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--out", type=Path, default=GRAFANA / "router.png")
    arguments = parser.parse_args()
    if shutil.which("prometheus") is None:
        sys.exit("prometheus is not installed: apt-get install prometheus")
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fc-router-")))
        engines = stack.enter_context(
            Engines(NUM_ENGINES, prefill_s_per_token=1e-4, token_interval_s=0.02)
        )
        router = stack.enter_context(RouterProcess(engines.engines))
        target = router.control.removeprefix("http://")
        scraping = prometheus_scraping(target, None, directory, "flexcache-router")
        prometheus = Prometheus(stack.enter_context(scraping))
        stack.enter_context(Conversations(router.url, NUM_CONVERSATIONS))
        started = time.time()
        time.sleep(0.5 * arguments.seconds)
        engines.engines[0].kill()
        time.sleep(0.2 * arguments.seconds)
        engines.engines[0].start()
        time.sleep(0.3 * arguments.seconds)

        def span() -> Span:
            return Span(started, time.time(), SCRAPE_S)

        patience_ends = time.monotonic() + DATA_PATIENCE_S
        while time.monotonic() < patience_ends and queries_without_data(
            prometheus, span(), DASHBOARD
        ):
            time.sleep(SCRAPE_S)
        wrong = check_alerts(prometheus)
        empty = draw(prometheus, span(), arguments.out, DASHBOARD)
    for problem in wrong + [f"no data: {query}" for query in empty]:
        print(problem)
    print(f"{arguments.out} drawn; {len(empty)} queries without data, {len(wrong)} alerts amiss")
    return int(bool(wrong or empty))


if __name__ == "__main__":
    sys.exit(main())
