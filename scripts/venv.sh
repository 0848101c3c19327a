# Sets up the virtual environment of the demo and the tests, unless it is there. Sourced.
#
#   VENV         where it goes (default: .venv in this repository)
#   PYTHON_BIN   the interpreter it is made with (default: python3)
#
# Leaves $PYTHON, the environment's interpreter.

source "$(dirname "${BASH_SOURCE[0]}")/install.sh"
VENV=${VENV:-$ROOT/.venv}
PYTHON=$VENV/bin/python
REQUIREMENTS=$ROOT/scripts/requirements.txt
STAMP=$VENV/.complete-$(cat "$REQUIREMENTS" "$ROOT/pyproject.toml" | sha256sum | cut -c1-16)

# Mooncake's client is linked to libibverbs, which pip does not bring: unpacks Debian's into the
# environment. Needs no root and leaves the system as it is.
fetch_verbs() (
  debs=$VENV/debs
  mkdir -p "$debs/lists/partial" "$debs/cache/archives/partial" && cd "$debs" || exit 1
  apt=(apt-get -qq -o "Dir::State::lists=$debs/lists" -o "Dir::Cache=$debs/cache" -o Debug::NoLocking=1)
  "${apt[@]}" update &&
    "${apt[@]}" download libibverbs1 libnl-3-200 libnl-route-3-200 libnuma1 || exit 1
  mkdir -p "$VENV/verbs" && for deb in *.deb; do dpkg -x "$deb" system || exit 1; done
  find system -name 'lib*.so.*' -exec cp -P {} "$VENV/verbs" \;
)

if [ ! -e "$STAMP" ]; then
  started=$SECONDS
  echo "setting up $VENV (once; about 2.5 GB)"
  install_pinned "$VENV" "$REQUIREMENTS" || exit 1
  # Built here, since the newer wheels need AVX-512. Without it the SSD tier runs on threads.
  "$PYTHON" -m pip install -q liburing==2024.5.3 ||
    echo "  liburing does not build here: the SSD tier will use threads instead of io_uring"
  "$PYTHON" -m pip uninstall -qq -y flexcache  # its former name, in an environment made before
  "$PYTHON" -m pip install -q --no-deps --no-build-isolation -e "$ROOT" || exit 1
  ldconfig -p | grep -q 'libibverbs\.so\.1' || fetch_verbs > /dev/null 2>&1 ||
    echo "  libibverbs is not installed: Mooncake's tests will be skipped"
  touch "$STAMP"
  echo "  done in $((SECONDS - started)) s"
fi
[ ! -d "$VENV/verbs" ] || export LD_LIBRARY_PATH=$VENV/verbs${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
