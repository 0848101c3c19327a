# How virtual environments are made here. Sourced.
#
#   PYTHON_BIN   the interpreter that they are made with (default: python3)
#
# Leaves $ROOT, this repository.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PIP_DISABLE_PIP_VERSION_CHECK=1

# Counts packages as pip goes through them: on a terminal in place, else now and then.
show_progress() {
  awk -v total="$1" -v tty="$([ -t 1 ] && echo 1 || echo 0)" '
    /^Collecting /    { n++; say("collecting", $2) }
    /^Installing /    { printf "\n  unpacking %d packages, about a minute\n", n; fflush() }
    /^(ERROR|error)/  { print "\n  " $0; fflush() }
    function say(what, name) {
      if (tty) printf "\r  %3d/%d %s %-40s", n, total, what, substr(name, 1, 40)
      else if (n % 25 == 0) printf "  %3d/%d packages collected\n", n, total
      fflush()
    }'
}

# Makes an environment with exactly the listed packages: their own lists of needs are not read.
install_pinned() { # venv requirements
  [ -x "$1/bin/python" ] || "${PYTHON_BIN:-python3}" -m venv "$1" || return 1
  "$1/bin/python" -m pip install --no-deps -r "$2" 2>&1 | show_progress "$(grep -c '==' "$2")"
  [ "${PIPESTATUS[0]}" -eq 0 ] || { echo "pip could not install $2" >&2; return 1; }
}
