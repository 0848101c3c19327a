# Sets up the virtual environment in which SGLang is tested and shown, unless it is there. Sourced.
#
#   SGLANG_VENV   where it goes (default: .venv-sglang in this repository)

source "$(dirname "${BASH_SOURCE[0]}")/install.sh"
export SGLANG_VENV=${SGLANG_VENV:-$ROOT/.venv-sglang}
SGLANG_REQUIREMENTS=$ROOT/scripts/requirements-sglang.txt
SGLANG_STAMP=$SGLANG_VENV/.complete-$(cat "$SGLANG_REQUIREMENTS" "$ROOT/pyproject.toml" | sha256sum | cut -c1-16)

if [ ! -e "$SGLANG_STAMP" ]; then
  started=$SECONDS
  echo "setting up $SGLANG_VENV, for SGLang (once; about 2.8 GB)"
  install_pinned "$SGLANG_VENV" "$SGLANG_REQUIREMENTS" || exit 1
  "$SGLANG_VENV/bin/python" -m pip uninstall -qq -y flexcache  # as in venv.sh
  "$SGLANG_VENV/bin/python" -m pip install -q --no-deps --no-build-isolation -e "$ROOT" || exit 1
  touch "$SGLANG_STAMP"
  echo "  done in $((SECONDS - started)) s"
fi
