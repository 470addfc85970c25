// Command pause is the process of a pod's sandbox: it holds the pod's namespaces open.
//
// The kubelet starts one for every pod. It does nothing but reap the children that the
// kernel hands to process 1 of a shared process namespace, and end on SIGTERM or SIGINT.
package main

import (
	"os"
	"os/signal"
	"syscall"
)

func main() {
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, syscall.SIGCHLD, syscall.SIGINT, syscall.SIGTERM)
	for received := range signals {
		if received != syscall.SIGCHLD {
			return
		}
		reapChildren()
	}
}

// reapChildren collects every child that has ended; signals may coalesce, hence the loop.
func reapChildren() {
	for {
		pid, err := syscall.Wait4(-1, nil, syscall.WNOHANG, nil)
		if pid <= 0 || err != nil {
			return
		}
	}
}
