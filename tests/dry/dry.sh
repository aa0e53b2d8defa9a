#!/usr/bin/env bash
# dry.sh COMMAND...: runs it with the dry device in place of a GPU; builds the device first.
#   DRY_PYTHON   the Python of an environment with a CUDA build of torch (python)
#   DRY_BUILD    where the library is kept (a folder of the user's cache, one for each such environment)
# Further variables: README.md.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
site=$("${DRY_PYTHON:-python}" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
DRY_BUILD=${DRY_BUILD:-${XDG_CACHE_HOME:-$HOME/.cache}/hfpatch-dry/$(echo "$site" | md5sum | cut -c1-12)}
make -s -C "$here/device" SITE="$site" OUT="$DRY_BUILD" >&2
export LD_LIBRARY_PATH=$DRY_BUILD${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} TRITON_LIBCUDA_PATH=$DRY_BUILD
exec env LD_PRELOAD="$DRY_BUILD/libcuda.so.1" "$@"
