#!/bin/sh
# The first process of a guest: the machine's own files are its root file system, so it runs this checkout as it is.
# ROLE, ADDRESS, WORK, JOB and OPTIONS come from the kernel's command line; what JOB says goes to WORK.
export PATH=/usr/local/bin:/usr/local/sbin:/usr/bin:/usr/sbin:/bin:/sbin HOME=/root LC_ALL=C.UTF-8
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t tmpfs tmp /run
mount -t tmpfs -o size=900m tmp /mnt
mkdir -p /dev/shm /dev/pts
mount -t tmpfs shm /dev/shm
mount -t devpts devpts /dev/pts
ip link set lo up
echo "$NAME" >/proc/sys/kernel/hostname # a server of NFS 4 takes clients of one name for one, and ends their sessions in turn
ended() { # whole when it is there, for who waits for it
    echo "$1" >"$WORK/$NAME.rc.part"
    mv "$WORK/$NAME.rc.part" "$WORK/$NAME.rc"
}
[ -z "$ADDRESS" ] || {
    ip addr add "$ADDRESS/24" dev vec0
    ip link set vec0 up
    mount -t tmpfs tmp /var/lib/nfs
}
case $ROLE in
disk)
    mkdir -p /mnt/disk
    mount -t "$OPTIONS" /dev/ubda /mnt/disk && sh -c "$(cat "$JOB")" >>"$WORK/$NAME.out" 2>&1
    ended $?
    cd /
    umount /mnt/disk
    ;;
server)
    mkdir -p /var/lib/nfs/rpc_pipefs /var/lib/nfs/v4recovery /var/lib/nfs/sm /mnt/export
    touch /var/lib/nfs/etab /var/lib/nfs/rmtab
    modprobe nfsd
    mount -t ext4 /dev/ubda /mnt/export
    mount -t nfsd nfsd /proc/fs/nfsd
    exportfs -o "rw,no_root_squash,fsid=0,no_subtree_check,sync" '10.99.0.0/24:/mnt/export'
    rpcbind -w 2>/dev/null
    rpc.mountd
    # After a crash clients have this long to say what they had open; the default is 90 s.
    echo 10 >/proc/fs/nfsd/nfsv4gracetime
    echo 10 >/proc/fs/nfsd/nfsv4leasetime
    rpc.nfsd 8
    sleep 1
    touch "$WORK/server.ready"
    while [ ! -e "$WORK/stop" ]; do sleep 1; done
    rpc.nfsd 0
    umount /mnt/export
    ;;
client)
    modprobe nfsv3
    modprobe nfsv4
    mkdir -p /mnt/nfs
    case $OPTIONS in # only NFS 4 has a root of all exports
    vers=3*) export=/mnt/export ;;
    *) export=/ ;;
    esac
    for attempt in 1 2 3 4 5 6 7 8 9 10; do
        mount -t nfs -o "$OPTIONS" "10.99.0.1:$export" /mnt/nfs 2>>"$WORK/$NAME.out" && break
        sleep 1
    done
    mountpoint -q /mnt/nfs && sh -c "$(cat "$JOB")" >>"$WORK/$NAME.out" 2>&1
    ended $?
    cd /
    umount /mnt/nfs
    ;;
esac
sync
halt -f
