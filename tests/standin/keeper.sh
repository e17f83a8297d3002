#!/bin/sh
# Holds a stand-in: everything of it runs in the process namespace that this makes, and
# lives until standard input ends, which is when the owner closes it, exits or is killed.
# Process 1 ends then, and the kernel ends the others; links and mounts go with them.
# usage: keeper.sh DIR
unshare --pid --net --mount --uts --fork sh -c '
    hostname controller
    # /proc is still that of the machine, and so is the number.
    read -r pid rest < /proc/self/stat
    echo "$pid"
    cat
'
rm -rf "$1"
