"""Hosts that are network namespaces of this machine."""

import json
import os
import subprocess
import sys

# Seconds after which a run that has not ended is taken to hang.
TIMEOUT = 300

# Where the launchers of a job meet, on the first host.
PORT = 29400


class Hosts:
    """Some namespaces with an address each; one core for each of them if `cores` names some."""

    def __init__(self, names, addresses, cores=None):
        self.names = names
        self.addresses = addresses
        self.cores = cores

    def __len__(self):
        return len(self.names)

    def start(self, host, command, **more):
        """Starts a program on a host."""
        command = [str(word) for word in command]
        if self.cores:
            command = ["taskset", "-c", str(self.cores[host]), *command]
        return subprocess.Popen(["ip", "netns", "exec", self.names[host], *command], text=True, **more)

    def job(self, program, words, environment=()):
        """Runs the program with these words as a job of one rank on each host; the JSON that rank 0 prints."""
        # A job without a token says so on every host.
        environment = dict(os.environ, UNISONO_TOKEN=os.urandom(32).hex(), **dict(environment))
        nodes = []
        try:
            for host in range(len(self)):
                nodes.append(self.start(host, [
                    program, "run", "-n", 1, "--nnodes", len(self), "--node-rank", host,
                    "--rendezvous", f"{self.addresses[0]}:{PORT}", "--", program, *words,
                ], env=environment, stdout=subprocess.PIPE))
            answers = [node.communicate(timeout=TIMEOUT)[0] for node in nodes]
            if any(node.returncode for node in nodes):
                sys.exit(f"failed: {' '.join(str(word) for word in words)}")
            return json.loads(answers[0])
        finally:
            end(nodes)


class Pair(Hosts):
    """Two hosts, joined by a pair of virtual devices without a limit. For `with`."""

    DEVICE = "eth0"

    def __init__(self, pin):
        cores = sorted(os.sched_getaffinity(0)) if pin else None
        if pin and len(cores) < 2:
            sys.exit("one core for each of two hosts: there is only one")
        names = [f"unisono-pair-{os.getpid()}-{host}" for host in range(2)]
        super().__init__(names, ["10.78.0.1", "10.78.0.2"], cores)

    def __enter__(self):
        try:
            for name in self.names:
                ip("netns", "add", name)
                ip("-n", name, "link", "set", "lo", "up")
            ip("-n", self.names[0], "link", "add", self.DEVICE, "type", "veth",
               "peer", "name", self.DEVICE, "netns", self.names[1])
            for name, address in zip(self.names, self.addresses):
                ip("-n", name, "addr", "add", f"{address}/24", "dev", self.DEVICE)
                ip("-n", name, "link", "set", self.DEVICE, "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL)


class Lab(Hosts):
    """Hosts with links of so many Mbit/s to a switch, which the example `lab` of unisono-netlab makes. For `with`."""

    def __init__(self, program, hosts, rate):
        self.command = [str(program), str(hosts), str(rate)]
        super().__init__([], [])

    def __enter__(self):
        self.lab = subprocess.Popen(self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(int(self.command[1])):
            line = self.lab.stdout.readline().split()
            if len(line) != 2:
                sys.exit("there is no lab")
            self.names.append(line[0])
            self.addresses.append(line[1])
        return self

    def __exit__(self, *_):
        self.lab.stdin.close()
        self.lab.wait()


def ip(*words):
    subprocess.run(["ip", *words], check=True)


def end(processes):
    """Ends those that still run."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
        process.wait()
