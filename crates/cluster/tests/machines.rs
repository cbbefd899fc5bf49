//! Launchers of several machines, in one process: real connections, and a record that is kept in memory.

use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use unisono_cluster::membership::machines::{
    Joining, Machine, Machines, Record, Replaced, Status, Store, StoreError,
};
use unisono_cluster::membership::{
    Client, FirstStep, Heard, Home, Next, Order, Settings, View, WorkerId,
};
use unisono_net::Token;

const DEADLINE: Duration = Duration::from_secs(30);

/// A record in memory.
#[derive(Default)]
struct Memory {
    kept: Mutex<Option<(Vec<u8>, u64)>>,
    status: Mutex<Option<Status>>,
    result: Mutex<Vec<u8>>,
    is_away: AtomicBool,
}

impl Memory {
    fn check(&self) -> Result<(), StoreError> {
        match self.is_away.load(Ordering::Relaxed) {
            true => Err(StoreError::Unavailable("it is away".into())),
            false => Ok(()),
        }
    }

    fn record(&self) -> Record {
        Record::parse(&self.kept.lock().unwrap().as_ref().unwrap().0).unwrap()
    }
}

impl Store for Memory {
    fn read(&self) -> Result<Option<(Vec<u8>, u64)>, StoreError> {
        self.check()?;
        Ok(self.kept.lock().unwrap().clone())
    }

    fn replace(&self, revision: u64, value: &[u8]) -> Result<Replaced, StoreError> {
        self.check()?;
        let mut kept = self.kept.lock().unwrap();
        if kept.as_ref().map_or(0, |(_, revision)| *revision) != revision {
            return Ok(Replaced::Other(kept.clone()));
        }
        *kept = Some((value.to_vec(), revision + 1));
        Ok(Replaced::Done(revision + 1))
    }

    fn publish(&self, status: &Status) {
        *self.status.lock().unwrap() = Some(status.clone());
    }

    fn keep_result(&self, result: &[u8]) -> Result<(), StoreError> {
        self.check()?;
        *self.result.lock().unwrap() = result.to_vec();
        Ok(())
    }
}

/// A launcher on a thread of its own.
struct Launcher {
    me: Machine,
    port: u16,
    token: Token,
    orders: Receiver<Order>,
    events: Sender<Event>,
    thread: Option<JoinHandle<()>>,
}

enum Event {
    Heard(Heard),
    Ended(WorkerId),
    Leave,
    Close,
}

impl Launcher {
    fn join(store: &Arc<Memory>, workers: u32) -> Launcher {
        let settings = Settings {
            workers: 1,
            least: 1,
            most: 8,
            timeout: Duration::from_secs(5),
            patience: DEADLINE,
        };
        let (events, inbox) = channel();
        let hear = events.clone();
        let joining = Joining {
            workers,
            ip: Ipv4Addr::LOCALHOST.into(),
            host: "here".into(),
            token: None,
            encrypt: false,
            equal: String::new(),
            settings,
            deadline: Instant::now() + DEADLINE,
        };
        let hear = move |heard| drop(hear.send(Event::Heard(heard)));
        let mut machines =
            Machines::join(store.clone(), joining, Duration::ZERO, hear).expect("it joins");
        let (me, token) = (machines.me().clone(), machines.token().clone());
        let port = machines.address().port();
        let (orders, given) = channel();
        let begun = Instant::now();
        let run = move || {
            loop {
                let left = machines.deadline().map(|at| at.saturating_sub(begun.elapsed()));
                let event = inbox.recv_timeout(left.unwrap_or(DEADLINE));
                let now = begun.elapsed();
                let decided = match event {
                    Ok(Event::Heard(heard)) => machines.heard(now, heard),
                    Ok(Event::Ended(worker)) => machines.ended(now, worker),
                    Ok(Event::Leave) => machines.leave(now).expect("others are there"),
                    Ok(Event::Close) | Err(RecvTimeoutError::Disconnected) => return,
                    Err(RecvTimeoutError::Timeout) => machines.tick(now),
                };
                decided.into_iter().for_each(|order| drop(orders.send(order)));
            }
        };
        let thread = Some(std::thread::spawn(run));
        Launcher { me, port, token, orders: given, events, thread }
    }

    fn connect(&self, local: u32, life: u32) -> Client {
        let id = WorkerId { number: self.me.first + local, life };
        let deadline = Instant::now() + DEADLINE;
        Client::connect_to(("127.0.0.1", self.port), id, self.token.clone(), deadline).unwrap()
    }

    /// The process of a worker ends: its connection closes, and the launcher sees it.
    fn kill(&self, client: Client) {
        let id = client.id();
        drop(client);
        self.events.send(Event::Ended(id)).unwrap();
    }

    /// The launcher ends, and its workers with it.
    fn end(mut self, clients: Vec<Client>) {
        self.events.send(Event::Close).unwrap();
        self.thread.take().unwrap().join().unwrap();
        drop(clients);
    }

    fn expect(&self, wanted: &Order) {
        loop {
            let order = self.orders.recv_timeout(DEADLINE).expect("an order");
            if order == *wanted {
                return;
            }
        }
    }
}

impl Drop for Launcher {
    fn drop(&mut self) {
        let _ = self.events.send(Event::Close);
    }
}

/// All of them are in one epoch; entered again and again, for others may come later.
fn enter<'a>(clients: impl IntoIterator<Item = &'a Client>, after: u64) -> Vec<View> {
    let clients: Vec<&Client> = clients.into_iter().collect();
    std::thread::scope(|scope| {
        let count = clients.len();
        let enter = move |client: &Client| {
            let mut after = after;
            loop {
                let view = view(client.enter(after, &[], vec![7]).unwrap());
                if view.members.len() == count {
                    return view;
                }
                after = view.epoch;
                // As the members of a group that has failed, or that agreed to let others in.
                let deadline = Instant::now() + DEADLINE;
                let (over, told) = channel();
                client.when_over(after, move || over.send(()).unwrap_or(()));
                while !client.is_asked_to_regroup(after) && told.try_recv().is_err() {
                    assert!(Instant::now() < deadline, "the others do not come: {view:?}");
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
        };
        let entering: Vec<_> =
            clients.into_iter().map(|client| scope.spawn(move || enter(client))).collect();
        entering.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn view(next: Next) -> View {
    match next {
        Next::Epoch(view) => view,
        Next::Over => panic!("the run is not over"),
    }
}

/// Waits until all of them are asked to leave an epoch.
fn await_asked<'a>(clients: impl IntoIterator<Item = &'a Client>, epoch: u64) {
    let deadline = Instant::now() + DEADLINE;
    for client in clients {
        while !client.is_asked_to_regroup(epoch) {
            assert!(Instant::now() < deadline, "the members are not asked");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Waits until an epoch is over, as the launchers say.
fn await_over(client: &Client, epoch: u64) {
    let (over, told) = channel();
    client.when_over(epoch, move || over.send(()).unwrap_or(()));
    told.recv_timeout(DEADLINE).expect("it is told that the epoch is over");
}

#[test]
fn workers_of_three_machines_are_in_one_epoch_and_finish() {
    let store = Arc::new(Memory::default());
    let launchers: Vec<Launcher> = (0..3).map(|_| Launcher::join(&store, 1)).collect();
    let clients: Vec<Client> = launchers.iter().map(|launcher| launcher.connect(0, 0)).collect();
    let views = enter(&clients, 0);
    assert_eq!(store.record().members, views[0].members);
    let epoch = views[0].epoch;
    let rank_0 = views.iter().position(|view| view.rank == 0).unwrap();
    std::thread::scope(|scope| {
        for (index, client) in clients.iter().enumerate() {
            scope.spawn(move || match index == rank_0 {
                true => client.finish(epoch, b"weights".to_vec()).unwrap(),
                false => assert!(matches!(client.enter(epoch, &[], vec![7]), Ok(Next::Over))),
            });
        }
    });
    for (index, launcher) in launchers.iter().enumerate() {
        let result = (index == rank_0).then(|| b"weights".to_vec());
        launcher.expect(&Order::Finished(result));
    }
    assert!(store.record().is_complete);
    assert_eq!(*store.result.lock().unwrap(), b"weights");
    let status = store.status.lock().unwrap().clone().expect("it was published");
    assert_eq!((status.epoch, status.members.len()), (epoch, 3));
}

#[test]
fn a_lost_worker_is_done_without_and_let_in_again() {
    let store = Arc::new(Memory::default());
    let launchers: Vec<Launcher> = (0..3).map(|_| Launcher::join(&store, 1)).collect();
    let mut clients: Vec<Client> = launchers.iter().map(|l| l.connect(0, 0)).collect();
    let epoch = enter(&clients, 0)[0].epoch;

    launchers[2].kill(clients.pop().unwrap());
    await_over(&clients[0], epoch);
    let epoch = enter(&clients, epoch)[0].epoch;
    assert_eq!(store.record().members.len(), 2);

    let back = launchers[2].connect(0, 1);
    std::thread::scope(|scope| {
        let joining = scope.spawn(|| view(back.enter(0, &[], vec![7]).unwrap()));
        await_asked(&clients, epoch);
        let entering: Vec<_> = clients
            .iter()
            .map(|client| scope.spawn(move || view(client.enter(epoch, &[], vec![7]).unwrap())))
            .collect();
        let members = joining.join().unwrap().members;
        assert_eq!(members.len(), 3);
        entering.into_iter().for_each(|view| assert_eq!(view.join().unwrap().members, members));
    });
}

#[test]
fn another_launcher_takes_the_place_of_the_leader() {
    let store = Arc::new(Memory::default());
    let mut launchers: Vec<Launcher> = (0..3).map(|_| Launcher::join(&store, 1)).collect();
    let mut clients: Vec<Client> = launchers.iter().map(|l| l.connect(0, 0)).collect();
    let epoch = enter(&clients, 0)[0].epoch;
    assert_eq!(store.record().leader.number, 0);

    // The leader ends, with its worker.
    let leader = launchers.remove(0);
    leader.end(vec![clients.remove(0)]);
    await_over(&clients[0], epoch);
    let views = enter(&clients, epoch);
    assert_eq!(views[0].epoch, epoch + 1);
    assert_ne!(store.record().leader.number, 0);
    assert_eq!(store.record().epoch, epoch + 1);
    let epoch = views[0].epoch;

    // A machine that comes later is let in.
    launchers.push(Launcher::join(&store, 1));
    let late = launchers[2].connect(0, 0);
    let views = std::thread::scope(|scope| {
        let joining = scope.spawn(|| view(late.enter(0, &[], vec![7]).unwrap()));
        await_asked(&clients, epoch);
        let mut views: Vec<View> = clients
            .iter()
            .map(|client| scope.spawn(|| view(client.enter(epoch, &[], vec![7]).unwrap())))
            .collect::<Vec<_>>()
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect();
        views.push(joining.join().unwrap());
        views
    });
    assert_eq!((views[2].epoch, views[2].members.len()), (epoch + 1, 3));

    // Its machine leaves again, once all are known to have the state of the run.
    let epoch = views[0].epoch;
    let rank_0 = views.iter().position(|view| view.rank == 0).unwrap();
    clients.iter().chain([&late]).nth(rank_0).unwrap().stepped(first_step(epoch)).unwrap();
    launchers[2].events.send(Event::Leave).unwrap();
    std::thread::scope(|scope| {
        await_asked(clients.iter().chain([&late]), epoch);
        let leaving = scope.spawn(|| late.enter(epoch, &[], vec![7]).unwrap());
        let views = enter(&clients, epoch);
        assert_eq!(views[0].members.len(), 2);
        assert!(matches!(leaving.join().unwrap(), Next::Over));
    });
}

fn first_step(epoch: u64) -> FirstStep {
    FirstStep { epoch, step: 1, compute: 0.0, redone: false, behind: 0, from_checkpoint: false }
}

#[test]
fn changes_wait_while_the_store_is_away() {
    let store = Arc::new(Memory::default());
    let launchers: Vec<Launcher> = (0..2).map(|_| Launcher::join(&store, 1)).collect();
    let mut clients: Vec<Client> = launchers.iter().map(|l| l.connect(0, 0)).collect();
    let epoch = enter(&clients, 0)[0].epoch;
    store.is_away.store(true, Ordering::Relaxed);
    launchers[1].kill(clients.pop().unwrap());
    await_over(&clients[0], epoch);
    std::thread::scope(|scope| {
        let entering = scope.spawn(|| view(clients[0].enter(epoch, &[], vec![7]).unwrap()));
        std::thread::sleep(Duration::from_millis(300));
        assert!(!entering.is_finished(), "an epoch begins that no other launcher can know of");
        assert_eq!(store.record().epoch, epoch);
        store.is_away.store(false, Ordering::Relaxed);
        assert_eq!(entering.join().unwrap().epoch, epoch + 1);
    });
}

/// Members that left their epoch to let a worker in would wait for one that cannot begin.
#[test]
fn members_are_not_asked_to_let_a_worker_in_while_the_store_is_away() {
    let store = Arc::new(Memory::default());
    let launchers = [Launcher::join(&store, 1), Launcher::join(&store, 2)];
    let clients: Vec<Client> = launchers.iter().map(|l| l.connect(0, 0)).collect();
    let epoch = enter(&clients, 0)[0].epoch;
    store.is_away.store(true, Ordering::Relaxed);
    let late = launchers[1].connect(1, 0);
    std::thread::scope(|scope| {
        let joining = scope.spawn(|| view(late.enter(0, &[], vec![7]).unwrap()));
        std::thread::sleep(Duration::from_millis(300));
        let is_asked = clients.iter().any(|client| client.is_asked_to_regroup(epoch));
        assert!(!is_asked, "the next epoch cannot begin");
        store.is_away.store(false, Ordering::Relaxed);
        await_asked(&clients, epoch);
        let entering: Vec<_> = clients
            .iter()
            .map(|client| scope.spawn(move || view(client.enter(epoch, &[], vec![7]).unwrap())))
            .collect();
        assert_eq!(joining.join().unwrap().members.len(), 3);
        entering.into_iter().for_each(|view| assert_eq!(view.join().unwrap().members.len(), 3));
    });
}
