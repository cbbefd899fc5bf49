//! Workers that come and go, over real connections.

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use unisono_cluster::membership::{
    Client, Embedded, FirstStep, Happened, Heard, History, Home, Next, Occurrence, Order, Seen,
    Settings, Sign, View, WorkerId,
};
use unisono_net::Token;

const DEADLINE: Duration = Duration::from_secs(30);

/// A coordinator on a thread of its own, and the orders that it has given.
struct Job {
    port: u16,
    token: Token,
    orders: Receiver<Order>,
    happened: Receiver<Happened>,
    ends: std::sync::mpsc::Sender<Event>,
    thread: Option<JoinHandle<History>>,
}

enum Event {
    Heard(Heard),
    Ended(WorkerId),
    Close,
}

impl Job {
    fn new(workers: usize, most: usize) -> Job {
        let token = Token::random().unwrap();
        let (events, inbox) = channel();
        let settings = Settings {
            workers,
            least: 1,
            most,
            timeout: Duration::from_secs(10),
            patience: DEADLINE,
        };
        let hear = events.clone();
        let mut coordinator = Embedded::open(
            Ipv4Addr::LOCALHOST.into(),
            &token,
            settings,
            Duration::ZERO,
            move |heard| drop(hear.send(Event::Heard(heard))),
        )
        .unwrap();
        let (observed, happened) = channel();
        coordinator.observe(Arc::new(move |event| drop(observed.send(event))));
        let port = coordinator.address().port();
        let (orders, given) = channel();
        let begun = Instant::now();
        let run = move || {
            loop {
                let left = coordinator.deadline().map(|at| at.saturating_sub(begun.elapsed()));
                let event = inbox.recv_timeout(left.unwrap_or(DEADLINE));
                let now = begun.elapsed();
                let decided = match event {
                    Ok(Event::Heard(heard)) => coordinator.heard(now, heard),
                    Ok(Event::Ended(worker)) => coordinator.ended(now, worker),
                    Ok(Event::Close) | Err(RecvTimeoutError::Disconnected) => {
                        return coordinator.history();
                    }
                    Err(RecvTimeoutError::Timeout) => coordinator.tick(now),
                };
                decided.into_iter().for_each(|order| drop(orders.send(order)));
            }
        };
        let thread = Some(std::thread::spawn(run));
        Job { port, token, orders: given, happened, ends: events, thread }
    }

    fn connect(&self, number: u32, life: u32) -> Client {
        let (id, deadline) = (WorkerId { number, life }, Instant::now() + DEADLINE);
        Client::connect_to(("127.0.0.1", self.port), id, self.token.clone(), deadline).unwrap()
    }

    /// The process of a worker ends: its connection closes, and the launcher sees it.
    fn kill(&self, client: Client) {
        let id = client.id();
        drop(client);
        self.ends.send(Event::Ended(id)).unwrap();
    }

    fn close(&mut self) -> History {
        self.ends.send(Event::Close).unwrap();
        self.thread.take().unwrap().join().unwrap()
    }
}

/// All of them enter the next epoch after this one.
fn enter(clients: &[Client], after: u64) -> Vec<View> {
    std::thread::scope(|scope| {
        let entering: Vec<_> = clients
            .iter()
            .map(|client| scope.spawn(move || view(client.enter(after, &[], vec![7; 8]).unwrap())))
            .collect();
        entering.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn view(next: Next) -> View {
    match next {
        Next::Epoch(view) => view,
        Next::Over => panic!("the run is not over"),
    }
}

#[test]
fn an_epoch_follows_when_a_worker_is_lost_and_another_when_it_is_back() {
    let mut job = Job::new(3, 8);
    let mut clients: Vec<Client> = (0..3).map(|number| job.connect(number, 0)).collect();
    let views = enter(&clients, 0);
    for (rank, view) in views.iter().enumerate() {
        assert_eq!((view.epoch, view.rank, view.members.len()), (1, rank, 3));
        assert_eq!(view.addresses, vec![vec![7; 8]; 3]);
        assert_eq!(view.token, views[0].token);
    }

    let (over, told) = channel();
    clients[0].when_over(1, move || over.send(()).unwrap());
    job.kill(clients.remove(1));
    told.recv_timeout(DEADLINE).expect("who is left is told that the epoch is over");
    let views = enter(&clients, 1);
    let numbers = |view: &View| view.members.iter().map(|id| id.number).collect::<Vec<_>>();
    assert_eq!((views[0].epoch, numbers(&views[0])), (2, vec![0, 2]));
    assert_eq!((views[0].rank, views[1].rank), (0, 1));

    // Another life of the one that was lost: the members are asked to agree.
    assert!(!clients[0].is_asked_to_regroup(2));
    let back = job.connect(1, 1);
    let views = std::thread::scope(|scope| {
        let joining = scope.spawn(|| view(back.enter(0, &[], vec![9]).unwrap()));
        let deadline = Instant::now() + DEADLINE;
        while !clients.iter().all(|client| client.is_asked_to_regroup(2)) {
            assert!(Instant::now() < deadline, "the members are not asked");
            std::thread::sleep(Duration::from_millis(1));
        }
        let mut views = enter(&clients, 2);
        views.push(joining.join().unwrap());
        views
    });
    assert_eq!((views[2].epoch, numbers(&views[2]), views[2].rank), (3, vec![0, 2, 1], 2));
    assert_eq!(views[0].addresses[2], [9]);

    // Rank 0 hands in the result, which lets all go.
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| clients[1].enter(3, &[], Vec::new()).unwrap());
        clients[0].finish(3, b"weights".to_vec()).unwrap();
        assert!(matches!(waiting.join().unwrap(), Next::Over));
        assert!(matches!(back.enter(3, &[], Vec::new()).unwrap(), Next::Over));
    });
    let finished: Vec<Order> = job.orders.try_iter().collect();
    assert!(finished.contains(&Order::Finished(Some(b"weights".to_vec()))), "{finished:?}");
    let history = job.close();
    assert_eq!((history.epochs, history.workers_lost, history.workers_joined), (3, 1, 1));
}

#[test]
fn epochs_have_tokens_of_their_own() {
    let mut job = Job::new(1, 8);
    let clients = [job.connect(0, 0)];
    let first = enter(&clients, 0).remove(0);
    let second = enter(&clients, 1).remove(0);
    assert_ne!(first.token, second.token);
    assert_ne!(first.token, job.token);
    job.close();
}

#[test]
fn more_workers_than_there_is_room_for_wait_until_one_is_lost() {
    let mut job = Job::new(2, 2);
    let clients: Vec<Client> = (0..2).map(|number| job.connect(number, 0)).collect();
    let spare = job.connect(2, 0);
    enter(&clients, 0);
    let views = std::thread::scope(|scope| {
        let waiting = scope.spawn(|| view(spare.enter(0, &[], vec![1]).unwrap()));
        let [first, second] = <[Client; 2]>::try_from(clients).ok().unwrap();
        assert!(!first.is_asked_to_regroup(1));
        job.kill(second);
        // The spare may be later to say that it is ready than the other to be lost.
        let mut entered = view(first.enter(1, &[], vec![0]).unwrap());
        while entered.members.len() < 2 {
            entered = view(first.enter(entered.epoch, &[], vec![0]).unwrap());
        }
        (entered, waiting.join().unwrap())
    });
    assert_eq!((views.0.epoch, views.0.members), (views.1.epoch, views.1.members));
    assert_eq!((views.0.rank, views.1.rank), (0, 1));
    job.close();
}

#[test]
fn a_worker_that_is_in_no_epoch_sees_where_the_members_are_while_there_is_room() {
    let job = Job::new(2, 3);
    let mut clients: Vec<Client> = (0..2).map(|number| job.connect(number, 0)).collect();
    assert_eq!(clients[0].look().unwrap(), Seen::Nothing, "before the first epoch");
    enter(&clients, 0);
    let joiner = job.connect(2, 0);
    assert_eq!(joiner.look().unwrap(), Seen::Members(vec![vec![7; 8]; 2]));

    job.kill(clients.pop().unwrap());
    let deadline = Instant::now() + DEADLINE;
    while joiner.look().unwrap() != Seen::Regrouping {
        assert!(Instant::now() < deadline, "the epoch has lost a member, and another is left");
        std::thread::sleep(Duration::from_millis(1));
    }
    enter(&clients, 1);
    assert_eq!(joiner.look().unwrap(), Seen::Members(vec![vec![7; 8]]));

    let full = Job::new(1, 1);
    enter(&[full.connect(0, 0)], 0);
    assert_eq!(full.connect(1, 0).look().unwrap(), Seen::Nothing, "a spare waits");
}

#[test]
fn a_worker_that_says_what_makes_no_sense_is_killed() {
    let mut job = Job::new(2, 2);
    let clients: Vec<Client> = (0..2).map(|number| job.connect(number, 0)).collect();
    enter(&clients, 0);
    std::thread::scope(|scope| {
        // It was never in epoch 5.
        let waiting = scope.spawn(|| clients[1].enter(5, &[], vec![1]));
        let order = job.orders.recv_timeout(DEADLINE).unwrap();
        assert_eq!(order, Order::Kill(WorkerId { number: 1, life: 0 }, Sign::CutOff));
        job.close();
        assert!(waiting.join().unwrap().is_err(), "the coordinator is gone");
    });
}

#[test]
fn an_observer_is_told_what_happens_in_order() {
    let mut job = Job::new(2, 2);
    let clients: Vec<Client> = (0..2).map(|number| job.connect(number, 0)).collect();
    enter(&clients, 0);
    let [first, second] = <[Client; 2]>::try_from(clients).ok().unwrap();
    job.kill(second);
    view(first.enter(1, &[], vec![0]).unwrap());
    let step = FirstStep {
        epoch: 2,
        step: 7,
        compute: 0.0,
        redone: true,
        behind: 0,
        from_checkpoint: false,
    };
    first.stepped(step.clone()).unwrap();
    first.finish(2, Vec::new()).unwrap();
    let deadline = Instant::now() + DEADLINE;
    let mut happened: Vec<Happened> = Vec::new();
    while !happened.iter().any(|event| event.what == Occurrence::Finished) {
        let left = deadline.saturating_duration_since(Instant::now());
        happened.push(job.happened.recv_timeout(left).expect("it is told"));
    }
    let history = job.close();

    assert!(happened.is_sorted_by_key(|event| event.at), "{happened:?}");
    let [zero, one] = [0, 1].map(|number| WorkerId { number, life: 0 });
    let at = |what: &Occurrence| happened.iter().position(|event| event.what == *what);
    let expect = |what: &Occurrence| at(what).unwrap_or_else(|| panic!("{what:?}: {happened:?}"));
    let epoch = |epoch, members| expect(&Occurrence::Epoch { epoch, members });
    assert!(expect(&Occurrence::Connected(one)) < expect(&Occurrence::Ready(one)));
    assert!(expect(&Occurrence::Ready(one)) < epoch(1, vec![zero, one]));
    let losses = happened.iter().filter_map(|event| match event.what {
        Occurrence::Lost { worker, sign } => Some((worker, sign)),
        _ => None,
    });
    let losses: Vec<(WorkerId, Sign)> = losses.collect();
    // Its connection closes first, or its end is seen first; it is told once.
    assert!(matches!(losses[..], [(worker, Sign::CutOff | Sign::Ended)] if worker == one));
    let (worker, sign) = losses[0];
    assert!(expect(&Occurrence::Lost { worker, sign }) < epoch(2, vec![zero]));
    let recovery = history.recoveries.first().map(|recovery| recovery.seconds);
    assert!(recovery.is_some());
    assert!(epoch(2, vec![zero]) < expect(&Occurrence::Stepped { first: step, recovery }));
}
