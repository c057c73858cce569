#!/bin/sh
# Installs the wheels beside this file into a new folder, without network: sh install.sh FOLDER
#   PYTHON   the Python to install with; python3 where left out. Its version and machine type: target.txt
# Exit codes: 0 installed, 1 a file is damaged or does not install, 2 a fault in what was given.
set -eu
# Settings of the caller's shell would find other folders, or load modules that are not in the bundle.
unset CDPATH PYTHONPATH PYTHONHOME
folder=${1:-}
here=$(cd -- "$(dirname -- "$0")" && pwd)
python=${PYTHON:-python3}
refuse() {  # CODE MESSAGE
    echo "install.sh: $2" >&2
    exit "$1"
}
usage="name the folder to install into: sh install.sh /opt/polyclinic"
[ $# = 1 ] || refuse 2 "$usage"
case $folder in
"" | -*) refuse 2 "$usage" ;;
/*) ;;
*) folder=$PWD/$folder ;;
esac
# The first lines of the programs hold this path, and a shell reads some of them.
case $folder in
*[\"\$\`\\[:cntrl:]]*)
    refuse 2 "$folder holds a quote, \$, \`, \\ or control character, which a shell changes. Name another folder." ;;
esac
# A link to nothing exists too.
[ ! -e "$folder" ] && [ ! -L "$folder" ] ||
    refuse 2 "$folder exists already. Name a folder that does not exist, or remove this one."
command -v "$python" >/dev/null || refuse 2 "there is no $python. Install Python, or set PYTHON to its path."

target=$(cat "$here/target.txt")
# The same words as `target` in supply/bundle.py.
found=$("$python" -I -c 'import platform, sys
print(f"{sys.version_info.major}.{sys.version_info.minor} {platform.machine()}")')
[ "$found" = "$target" ] ||
    refuse 2 "this bundle is for Python $target, and $python is $found. Set PYTHON, or ask for a bundle that fits."

cd -- "$here"
# pip takes what lies in wheels/, and the sums say nothing of a file that they do not list.
for file in wheels/* wheels/.[!.]*; do
    [ ! -e "$file" ] && [ ! -L "$file" ] || cut -c 67- SHA256SUMS | grep -qxFe "$file" ||
        refuse 1 "$file is not in SHA256SUMS. Nothing was installed. Remove it, or unpack the bundle again."
done
sha256sum --check --strict --quiet SHA256SUMS ||
    refuse 1 "a file differs from SHA256SUMS. Nothing was installed. Copy the bundle again, and compare its SHA-256."
installer=$here/$(cut -c 67- SHA256SUMS | grep '^wheels/pip-')/pip    # pip runs from its wheel, and is not installed

cd -- "$OLDPWD"
mkdir -p -- "$(dirname -- "$folder")" && mkdir -- "$folder" || refuse 2 "$folder cannot be made, for the reason above."
trap 'rm -rf -- "$folder"; refuse 1 "not installed; the reason is above, and $folder is removed."' EXIT
trap 'exit 130' INT TERM
"$python" -I -m venv --without-pip "$folder"
# No setting of this machine may add a package index or let pip accept a file without a hash.
pip() {
    PIP_CONFIG_FILE=/dev/null "$folder/bin/python" -I "$installer" --isolated --disable-pip-version-check "$@"
}
pip install --quiet --no-index --find-links "$here/wheels" --no-deps --require-hashes --no-cache-dir \
    -r "$here/requirements.txt"
missing=$(pip check) || { echo "$missing" >&2; exit 1; }
version=$("$folder/bin/flwr-client" --version)
trap - EXIT
echo "Installed $version. Next: $folder/bin/flwr-client --help"
