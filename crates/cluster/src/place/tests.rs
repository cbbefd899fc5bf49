//! Environments as the launchers leave them, reduced to what is read or could mislead.

use super::slurm::{expand_counts, expand_nodes};
use super::unisono::split_host_port;
use super::*;

fn vars(text: &str) -> Vars {
    text.lines()
        .filter_map(|line| line.trim().split_once('='))
        .map(|(name, value)| (name.into(), value.into()))
        .collect()
}

fn place(text: &str) -> Result<Place, PlaceError> {
    Place::from_vars(&vars(text))
}

const TORCHRUN: &str = "
    GROUP_RANK=1
    GROUP_WORLD_SIZE=2
    LOCAL_RANK=1
    LOCAL_WORLD_SIZE=2
    MASTER_ADDR=node-a
    MASTER_PORT=29500
    OMP_NUM_THREADS=1
    RANK=3
    ROLE_NAME=default
    ROLE_RANK=3
    ROLE_WORLD_SIZE=4
    TORCHELASTIC_ERROR_FILE=/tmp/torchelastic/none/attempt_0/3/error.json
    TORCHELASTIC_MAX_RESTARTS=0
    TORCHELASTIC_RESTART_COUNT=0
    TORCHELASTIC_RUN_ID=none
    TORCHELASTIC_USE_AGENT_STORE=True
    WORLD_SIZE=4";

const OPEN_MPI: &str = "
    OMPI_COMM_WORLD_LOCAL_RANK=1
    OMPI_COMM_WORLD_LOCAL_SIZE=2
    OMPI_COMM_WORLD_NODE_RANK=1
    OMPI_COMM_WORLD_RANK=1
    OMPI_COMM_WORLD_SIZE=2
    OMPI_MCA_ess_base_jobid=1098383361
    OMPI_MCA_ess_base_vpid=1
    OMPI_MCA_orte_hnp_uri=1098383360.0;tcp://192.0.2.2,10.0.0.2:37947;tcp6://[fd00::2]:52023
    OMPI_MCA_orte_num_nodes=1
    OMPI_UNIVERSE_SIZE=2
    PMIX_HOSTNAME=vm
    PMIX_ID=1098383361.1
    PMIX_NAMESPACE=1098383361
    PMIX_RANK=1
    PMIX_SERVER_URI41=1098383360.0;tcp4://127.0.0.1:37859";

const SLURM: &str = "
    SLURM_JOBID=4711
    SLURM_JOB_ID=4711
    SLURM_JOB_NODELIST=node[08-11]
    SLURM_JOB_NUM_NODES=4
    SLURM_LOCALID=0
    SLURM_NNODES=3
    SLURM_NODEID=2
    SLURM_NODELIST=node[09-11]
    SLURM_NTASKS=5
    SLURM_PROCID=4
    SLURM_STEPID=2
    SLURM_STEP_ID=2
    SLURM_STEP_NODELIST=node[09-11]
    SLURM_STEP_NUM_NODES=3
    SLURM_STEP_NUM_TASKS=5
    SLURM_STEP_TASKS_PER_NODE=2(x2),1
    SLURM_TASKS_PER_NODE=2(x3)";

#[test]
fn without_a_launcher_there_is_a_world_of_one() {
    let place = place("PATH=/bin").unwrap();
    assert_eq!((place.rank, place.world), (0, 1));
    assert_eq!(place.rendezvous, Rendezvous::Alone);
    assert_eq!(place.launcher, Launcher::None);
}

#[test]
fn torchrun_leaves_master_port_alone() {
    let place = place(TORCHRUN).unwrap();
    assert_eq!((place.rank, place.world, place.local_rank, place.local_world), (3, 4, 1, 2));
    assert_eq!(place.node, Some(1));
    let ports: Vec<u16> = (29501..=29516).collect();
    assert_eq!(place.rendezvous, Rendezvous::RankZero { host: "node-a".into(), ports });
    assert_eq!(place.launcher, Launcher::Torchrun);
    assert_eq!(place.token, None);
    assert!(!place.single_node());
}

#[test]
fn a_torchrun_restart_is_another_job() {
    let restarted = format!("{TORCHRUN}\nTORCHELASTIC_RESTART_COUNT=1");
    assert_ne!(place(TORCHRUN).unwrap().job_name, place(&restarted).unwrap().job_name);
}

#[test]
fn a_high_master_port_is_flanked_from_below() {
    let place = place(&format!("{TORCHRUN}\nMASTER_PORT=65530")).unwrap();
    let Rendezvous::RankZero { ports, .. } = place.rendezvous else { panic!("not hosted") };
    assert_eq!(ports, (65514..65530).collect::<Vec<u16>>());
}

#[test]
fn ranks_started_by_hand_need_local_ranks_only_across_machines() {
    let by_hand = "RANK=1\nWORLD_SIZE=2\nMASTER_PORT=1234\nMASTER_ADDR=";
    let local = place(&format!("{by_hand}localhost")).unwrap();
    assert_eq!((local.local_rank, local.local_world), (1, 2));
    let remote = place(&format!("{by_hand}node-a")).unwrap_err();
    assert!(matches!(remote, PlaceError::Missing { variable: "LOCAL_RANK", .. }), "{remote}");
}

#[test]
fn torchrun_mistakes_name_the_variable() {
    let error = place("RANK=0").unwrap_err();
    assert!(error.to_string().contains("WORLD_SIZE is not set"), "{error}");
    let error = place(&format!("{TORCHRUN}\nRANK=x")).unwrap_err();
    assert!(error.to_string().contains("RANK=x"), "{error}");
    let error = place(&format!("{TORCHRUN}\nRANK=4")).unwrap_err();
    assert_eq!(
        error,
        PlaceError::OutOfRange { launcher: Launcher::Torchrun, which: "rank", rank: 4, world: 4 }
    );
    let error = place(&format!("{TORCHRUN}\nUNISONO_TOKEN=secret")).unwrap_err();
    assert!(!error.to_string().contains("secret"), "{error}");
}

#[test]
fn unisono_comes_before_torchrun() {
    let token = Token::public("test");
    let ours =
        format!("{TORCHRUN}\nUNISONO_RENDEZVOUS=[::1]:4000\nUNISONO_TOKEN={}", token.to_hex());
    let ours = place(&ours).unwrap();
    assert_eq!(ours.launcher, Launcher::Unisono);
    assert_eq!(ours.rendezvous, Rendezvous::Launcher { host: "::1".into(), port: 4000 });
    assert_eq!(ours.token, Some(token));
    let error = place(&format!("{TORCHRUN}\nUNISONO_RENDEZVOUS=a:1")).unwrap_err();
    assert!(matches!(error, PlaceError::Missing { variable: "UNISONO_TOKEN", .. }), "{error}");
}

#[test]
fn mpirun_on_one_machine_needs_no_flag() {
    let one = place(OPEN_MPI).unwrap();
    assert_eq!((one.rank, one.world, one.local_rank, one.local_world), (1, 2, 1, 2));
    let Rendezvous::RankZero { host, ports } = &one.rendezvous else { panic!("not hosted") };
    assert_eq!(host, LOOPBACK);
    assert_eq!(ports.len(), usize::from(CANDIDATES));
    assert!(ports.iter().all(|port| (20_000..32_768).contains(port)));

    let other = place(&format!("{OPEN_MPI}\nPMIX_NAMESPACE=1098383362")).unwrap();
    assert_ne!(one.rendezvous, other.rendezvous);
}

#[test]
fn mpirun_across_machines_meets_where_mpirun_runs() {
    let across = format!("{OPEN_MPI}\nOMPI_COMM_WORLD_LOCAL_SIZE=1\nOMPI_COMM_WORLD_LOCAL_RANK=0");
    let host = |text: &str| match place(text).unwrap().rendezvous {
        Rendezvous::RankZero { host, .. } => host,
        other => panic!("{other:?}"),
    };
    assert_eq!(host(&across), "192.0.2.2");
    assert_eq!(host(&format!("{across}\nMASTER_ADDR=node-a")), "node-a");
    assert_eq!(
        host(&format!("{across}\nOMPI_MCA_orte_hnp_uri=1.0;tcp6://[fd00::2]:52")),
        "fd00::2"
    );
    let error = place(&format!("{across}\nOMPI_MCA_orte_hnp_uri=")).unwrap_err();
    assert!(matches!(error, PlaceError::Missing { variable: "MASTER_ADDR", .. }), "{error}");
}

#[test]
fn slurm_meets_on_the_first_node_of_the_step() {
    let place = place(SLURM).unwrap();
    assert_eq!((place.rank, place.world, place.local_rank, place.local_world), (4, 5, 0, 1));
    assert_eq!(place.node, Some(2));
    let Rendezvous::RankZero { host, .. } = place.rendezvous else { panic!("not hosted") };
    assert_eq!(host, "node09");
    assert_eq!(place.job_name, "slurm:4711.2");
}

#[test]
fn a_slurm_batch_script_is_not_a_step() {
    let batch = "SLURM_JOB_ID=4711\nSLURM_PROCID=0\nSLURM_NTASKS=8\nSLURM_NODEID=0";
    assert_eq!(place(batch).unwrap().launcher, Launcher::None);
}

#[test]
fn mpich_is_told_to_say_where_to_meet() {
    let mpich = "PMI_RANK=1\nPMI_SIZE=2\nMPI_LOCALNRANKS=2\nMPI_LOCALRANKID=1";
    let error = place(mpich).unwrap_err();
    assert!(matches!(error, PlaceError::Missing { variable: "MASTER_ADDR", .. }), "{error}");
    let told = place(&format!("{mpich}\nMASTER_ADDR=a\nMASTER_PORT=99")).unwrap();
    assert_eq!((told.rank, told.local_world, told.launcher), (1, 2, Launcher::Pmi));
}

#[test]
fn node_lists_expand() {
    let expand = |list| expand_nodes(list).map(|nodes| nodes.join(" "));
    let expected = [
        ("n[001-003,7],m1", Some("n001 n002 n003 n7 m1")),
        ("single", Some("single")),
        ("a,b-2", Some("a b-2")),
        ("n[09-11]", Some("n09 n10 n11")),
        ("r[1-2]n[1-2]", Some("r1n1 r1n2 r2n1 r2n2")),
        ("n[1-2].site", Some("n1.site n2.site")),
        ("", None),
        ("n[1", None),
        ("n1]", None),
        ("n[a-b]", None),
        ("n[0-18446744073709551615]", None),
        ("a,,b", None),
    ];
    for (list, nodes) in expected {
        assert_eq!(expand(list).as_deref(), nodes, "{list}");
    }
}

#[test]
fn task_counts_expand() {
    assert_eq!(expand_counts("2(x3),1"), Some(vec![2, 2, 2, 1]));
    assert_eq!(expand_counts("4"), Some(vec![4]));
    assert_eq!(expand_counts("4(x"), None);
    assert_eq!(expand_counts("4(x99999999999)"), None);
}

#[test]
fn hosts_and_ports_split() {
    assert_eq!(split_host_port("a.b:80"), Some(("a.b", 80)));
    assert_eq!(split_host_port("[fd00::2]:80"), Some(("fd00::2", 80)));
    for wrong in ["a", ":80", "a:", "a:65536", "fd00::2:80", "[::1:80", "[]:1"] {
        assert_eq!(split_host_port(wrong), None, "{wrong}");
    }
}

#[test]
fn a_world_beyond_reason_is_refused() {
    let error = place(&TORCHRUN.replace("WORLD_SIZE=4", "WORLD_SIZE=4000000000")).unwrap_err();
    assert!(matches!(error, PlaceError::TooLarge { world: 4_000_000_000, .. }), "{error}");
}
