"""The shell functions with which a stage's instructions are carried out inside its base image, as Docker would.

A script runs as root of the container with an empty environment. `/.prorl` has what it copies from: the build's folder
as `context`, other stages and images under names of their own. Names that begin with `_` are the script's: commands of
the Dockerfile see only exported ones, which are its variables. For a shell of POSIX, as `dash` and that of busybox.
"""

from __future__ import annotations

INPUTS = "/.prorl"
"""Where a build's files are mounted, read-only, while a stage is built."""
PRELUDE = r"""
set -e
umask 022
_path=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
_meta=/.singularity.d
_at='the start' _directory=/ _user= _variables=
trap '[ $? = 0 ] || echo "Dockerfile, $_at failed" >&2' EXIT
unset PATH
for _file in $_meta/env/10-docker2singularity.sh $_meta/env/9?-environment.sh; do
    [ ! -f "$_file" ] || . "$_file"
done
export PATH="${PATH:-$_path}"
[ ! -f $_meta/prorl.directory ] || IFS= read -r _directory < $_meta/prorl.directory
[ ! -f $_meta/prorl.user ] || IFS= read -r _user < $_meta/prorl.user

at() { _at=$1; echo "$1"; }

quoted() {
    _rest=$1 _done=
    while :; do
        case $_rest in *\'*) ;; *) break ;; esac
        _done="$_done${_rest%%\'*}'\\''" _rest=${_rest#*\'}
    done
    printf "'%s'" "$_done$_rest"
}

doubled() {  # of the other quoting, '\'', Apptainer keeps the backslash
    _rest=$1 _done=
    while [ -n "$_rest" ]; do
        _char=${_rest%"${_rest#?}"} _rest=${_rest#?}
        case $_char in '"' | \\ | '$' | '`') _done="$_done\\" ;; esac
        _done=$_done$_char
    done
    printf '"%s"' "$_done"
}

absolute() {
    case $1 in /*) printf %s "$1" ;; *) printf %s "${_directory%/}/$1" ;; esac
}

identify() {
    _uid=${_user%%:*} _gid= _home=/ _login=
    case $_user in *:*) _gid=${_user#*:} ;; esac
    [ -n "$_uid" ] || _uid=0
    if [ -f /etc/passwd ]; then
        while IFS=: read -r _n _x _u _g _i _h _s; do
            if [ "$_n" = "$_uid" ] || [ "$_u" = "$_uid" ]; then
                _login=$_n _uid=$_u _home=$_h _gid=${_gid:-$_g}
                break
            fi
        done < /etc/passwd
    fi
    if [ -n "$_gid" ] && [ -f /etc/group ]; then
        while IFS=: read -r _n _x _g _s; do
            if [ "$_n" = "$_gid" ]; then _gid=$_g; break; fi
        done < /etc/group
    fi
    case $_uid:${_gid:=0} in *[!0-9:]*) echo "the image has no user $_user" >&2; exit 1 ;; esac
}

run() (
    identify
    export HOME="${HOME:-$_home}"
    cd "$_directory"
    [ "$_uid" != 0 ] || exec "$@"
    _setpriv=$(PATH=$_path; command -v setpriv || :)
    _groups=--clear-groups
    [ -z "$_login" ] || _groups=--init-groups
    if [ -n "$_setpriv" ] && $_setpriv --reuid "$_uid" --regid "$_gid" $_groups true 2> /dev/null; then
        exec "$_setpriv" --reuid "$_uid" --regid "$_gid" $_groups "$@"
    fi
    _line="cd $(quoted "$_directory") && exec"
    for _word; do _line="$_line $(quoted "$_word")"; done
    _su=$(PATH=$_path; command -v su || :)
    [ -n "$_su" ] && [ -n "$_login" ] || { echo "the image has no program to become $_user" >&2; exit 1; }
    exec "$_su" -m -s /bin/sh "$_login" -c "$_line"
)

folder() (
    PATH=$_path
    [ -n "$1" ] && [ ! -d "$1" ] || exit 0
    case ${1%/*} in '' | "$1") ;; *) folder "${1%/*}" "$2" ;; esac
    mkdir "$1"
    [ -z "$2" ] || chown "$2" "$1"
)

directory() {
    _directory=$(absolute "$1")
    identify
    folder "$_directory" "$_uid:$_gid"
}

place() (
    _owner=$1 _mode=$2 _source=$3 _target=$4
    if [ "$_owner" = kept ] && [ -z "$_mode" ]; then
        cp -a "$_source" "$_target"
        exit 0
    fi
    _copy=/.prorl.copy
    rm -rf $_copy
    mkdir $_copy
    case $_target in */) _name=${_source##*/} ;; *) _name=${_target##*/} ;; esac
    cp -a "$_source" "$_copy/$_name"
    [ "$_owner" = kept ] || chown -hR "$_owner" "$_copy/$_name"
    [ -z "$_mode" ] || [ -L "$_copy/$_name" ] || chmod -R "$_mode" "$_copy/$_name"
    cp -a "$_copy/$_name" "$_target"
    rm -rf $_copy
)

owned() (
    [ "$1" != kept ] || { printf kept; exit 0; }
    _user=$1
    identify
    case $1 in *:*) ;; *) [ -n "$_login" ] || _gid=$_uid ;; esac
    printf %s "$_uid:$_gid"
)

copy() (
    PATH=$_path
    _owner=$(owned "$1") _mode=$2 _target=$(absolute "$3") _several=$4
    _parents=$_owner
    [ "$_owner" != kept ] || _parents=
    shift 4
    case $_target in */ | */.) _several=1 ;; esac
    for _source; do
        if [ -d "$_source" ]; then
            folder "${_target%/}" "$_parents"
            for _entry in "$_source"/* "$_source"/.[!.]* "$_source"/..?*; do
                if [ -e "$_entry" ] || [ -L "$_entry" ]; then place "$_owner" "$_mode" "$_entry" "${_target%/}/"; fi
            done
        elif [ ! -e "$_source" ] && [ ! -L "$_source" ]; then
            echo "there is no ${_source#/.prorl/}" >&2
            exit 1
        elif [ -n "$_several" ] || [ -d "$_target" ]; then
            folder "${_target%/}" "$_parents"
            place "$_owner" "$_mode" "$_source" "${_target%/}/"
        else
            folder "${_target%/*}" "$_parents"
            place "$_owner" "$_mode" "$_source" "$_target"
        fi
    done
)

write() (
    PATH=$_path
    _target=$(absolute "$3")
    case $_target in */ | */.) _target=$_target/$4 ;; *) [ ! -d "$_target" ] || _target=$_target/$4 ;; esac
    _owner=$(owned "$1")
    folder "${_target%/*}" "$_owner"
    printf %s "$5" > "$_target"
    chown "$_owner" "$_target"
    [ -z "$2" ] || chmod "$2" "$_target"
)

unpack() (
    PATH=$_path
    _target=$(absolute "$1")
    folder "${_target%/}" ''
    tar -xf "$2" -C "$_target"
)

lend() (
    PATH=$_path
    _target=$(absolute "$2")
    case ${_target%/*} in '') ;; *) folder "${_target%/*}" '' ;; esac
    [ ! -d "$_target" ] || rmdir "$_target"
    ln -s "$1" "$_target"
)

take() (
    PATH=$_path
    rm "$(absolute "$1")"
)

finish() {
    [ -d $_meta/env ] || (PATH=$_path; mkdir -p $_meta/env)
    for _name in $_variables; do
        eval "_value=\$$_name"
        printf 'export %s=%s\n' "$_name" "$(doubled "$_value")" >> $_meta/env/91-environment.sh
    done
    printf '%s\n' "$_directory" > $_meta/prorl.directory
    printf '%s\n' "$_user" > $_meta/prorl.user
}
"""
