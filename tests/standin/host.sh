#!/bin/sh
# The inside of one host: process 1 of its own namespaces.
# usage: host.sh NAME ADDRESS INTERFACE DIR SHARED...
#   DIR is the stand-in's; each SHARED is a directory below /tmp that all hosts have.
set -eu
name=$1 address=$2 interface=$3 folder=$4
shift 4
own=$folder/hosts/$name

hostname "$name"

# What is another on each machine of a cluster. /tmp is made aside and moved, because what
# is bound into it lies below it.
mkdir "$own/tmp"
mount -t tmpfs -o mode=1777 tmpfs "$own/tmp"
for shared in "$@"; do
    mkdir -p "$own/tmp/${shared#/tmp/}"
    mount --bind "$shared" "$own/tmp/${shared#/tmp/}"
done
mount --move "$own/tmp" /tmp
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mount -t tmpfs -o mode=755 tmpfs /run
mkdir /run/sshd /run/cgroup
mount --bind "$folder/etc/hosts" /etc/hosts
mount --bind "$folder/etc/ssh_config" /etc/ssh/ssh_config
mount --bind "$folder/etc/profile.d" /etc/profile.d

# /sys shows the network of whoever mounts it; Slurm wants the control groups in it.
mount --rbind /sys/fs/cgroup /run/cgroup
mount -t sysfs sysfs /sys
mount --rbind /run/cgroup /sys/fs/cgroup
umount --recursive --lazy /run/cgroup

# The number is the machine's until /proc is the host's. It is asked for to make the link.
read -r pid rest < /proc/self/stat
echo "$pid" > "$own/pid.new"
mv "$own/pid.new" "$own/pid"
until ip link show "$interface" > /dev/null 2>&1; do sleep 0.02; done
ip -batch - <<EOF
link set lo up
link set $interface addrgenmode none
address add $address/24 dev $interface
link set $interface up
EOF

mount -t proc proc /proc
exec /usr/sbin/sshd -D -e -f "$folder/etc/sshd_config" 2> "$own/sshd.log"
