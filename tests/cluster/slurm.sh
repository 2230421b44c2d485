#!/bin/sh
# A Slurm of one node on loopback, from the distribution's packages, and jobs on it: slurm.sh PYTHON. Everything that is
# started here is ended here; nothing of an installed Slurm's own settings is read or changed.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
python=$1
skip() { echo "skipped, Slurm not tested: $1"; exit 0; }
[ "$(id -u)" = 0 ] || skip "its daemons need root"
needed="munged slurmctld slurmd slurmdbd sbatch sacct mariadbd mariadb-install-db"
missing() { for each in $needed; do command -v "$each" >/dev/null || { echo "$each"; return; }; done; }
if [ -n "$(missing)" ]; then
    command -v apt-get >/dev/null || skip "no $(missing), and no apt-get to install it"
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
        munge slurmctld slurmd slurmdbd slurm-client mariadb-server; } >/dev/null 2>&1 || skip "apt-get cannot install it"
    [ -z "$(missing)" ] || skip "no $(missing) in the packages"
fi

folder=$(mktemp -d)
chmod 755 "$folder"
started=""
end() {
    for each in $started; do kill "$each" 2>/dev/null || true; done
    for each in $started; do wait "$each" 2>/dev/null || true; done
    rm -rf "$folder"
}
trap end EXIT
trap 'exit 1' INT TERM
begin() { name=$1; shift; "$@" >"$folder/$name.log" 2>&1 & started="$! $started"; }
await() { # NAME COMMAND...: until the command succeeds, for half a minute
    name=$1; shift
    for _ in $(seq 60); do "$@" >/dev/null 2>&1 && return; sleep 0.5; done
    tail -n 5 "$folder/$name.log"
    skip "$name does not start here"
}

mkdir -m 700 "$folder/munge" "$folder/state" "$folder/spool"
mkdir -m 755 "$folder/run"
dd if=/dev/urandom of="$folder/munge/key" bs=1024 count=1 2>/dev/null
chmod 600 "$folder/munge/key"
begin munged munged --foreground --force --key-file="$folder/munge/key" --socket="$folder/run/munge" \
    --pid-file="$folder/munge/pid" --log-file="$folder/munge/log" --seed-file="$folder/munge/seed"
await munged test -S "$folder/run/munge"

mariadb-install-db --no-defaults --user=root --datadir="$folder/db" --auth-root-authentication-method=normal \
    >"$folder/mariadbd.log" 2>&1 || skip "mariadb-install-db fails here"
begin mariadbd mariadbd --no-defaults --user=root --datadir="$folder/db" --socket="$folder/run/db" \
    --bind-address=127.0.0.1 --port=26819 --pid-file="$folder/run/db.pid" --innodb-buffer-pool-size=64M
await mariadbd mariadb --no-defaults --socket="$folder/run/db" -e "CREATE USER IF NOT EXISTS slurm@'127.0.0.1'; CREATE USER IF NOT EXISTS slurm@localhost; GRANT ALL ON *.* TO slurm@'127.0.0.1'; GRANT ALL ON *.* TO slurm@localhost"

host=$(hostname -s)
export SLURM_CONF="$folder/slurm.conf"
cat >"$folder/slurmdbd.conf" <<CONF
AuthType=auth/munge
AuthInfo=socket=$folder/run/munge
DbdHost=localhost
DbdPort=26820
SlurmUser=root
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort=26819
StorageUser=slurm
StorageLoc=accounting
PidFile=$folder/run/slurmdbd.pid
CONF
chmod 600 "$folder/slurmdbd.conf"
cat >"$SLURM_CONF" <<CONF
ClusterName=loopback
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=26817
SlurmdPort=26818
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$folder/run/munge,cred_expire=10
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool
SlurmctldPidFile=$folder/run/slurmctld.pid
SlurmdPidFile=$folder/run/slurmd.pid
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=localhost
AccountingStoragePort=26820
AccountingStoragePass=$folder/run/munge
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
KillWait=2
ReturnToService=2
MpiDefault=none
NodeName=$host NodeAddr=127.0.0.1 CPUs=3 State=UNKNOWN
PartitionName=low Nodes=$host Default=YES PriorityTier=1 State=UP
PartitionName=high Nodes=$host PriorityTier=2 State=UP
CONF
begin slurmdbd slurmdbd -D
await slurmdbd sacctmgr --noheader list cluster
begin slurmctld slurmctld -D -c
await slurmctld scontrol ping
begin slurmd slurmd -D -N "$host"
await slurmd sh -c 'sinfo --noheader --format=%T | grep -q -x idle'
"$python" "$here/slurm_sweep.py"
