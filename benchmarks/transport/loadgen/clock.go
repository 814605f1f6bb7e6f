package main

import (
	"container/heap"
	"runtime"
	"sync"
	"syscall"
	"time"
)

// longestSleep bounds how late a thing that was entered during a sleep can be.
const longestSleep = 500 * time.Microsecond

// clock does things when they are due, in a thread of its own: timers of the runtime may be a millisecond late, and
// what is late goes out with what is due then, so that a server would see fewer and larger packets.
type clock struct {
	mu  sync.Mutex
	due entries
}

type entry struct {
	at time.Time
	do func(at time.Time)
}

func newClock() *clock {
	c := &clock{}
	go c.run()
	return c
}

// at has `do` called at that time, without any lock.
func (c *clock) at(at time.Time, do func(at time.Time)) {
	c.mu.Lock()
	heap.Push(&c.due, entry{at, do})
	c.mu.Unlock()
}

func (c *clock) run() {
	runtime.LockOSThread()
	var now []entry
	for {
		c.mu.Lock()
		rest := longestSleep
		for len(c.due) > 0 {
			if rest = time.Until(c.due[0].at); rest > 0 {
				break
			}
			now = append(now, heap.Pop(&c.due).(entry))
		}
		c.mu.Unlock()
		for _, each := range now {
			each.do(each.at)
		}
		if len(now) > 0 {
			now = now[:0]
			continue
		}
		sleep := syscall.NsecToTimespec(int64(min(rest, longestSleep)))
		_ = syscall.Nanosleep(&sleep, nil) // woken early, it looks again
	}
}

type entries []entry

func (e entries) Len() int           { return len(e) }
func (e entries) Less(i, j int) bool { return e[i].at.Before(e[j].at) }
func (e entries) Swap(i, j int)      { e[i], e[j] = e[j], e[i] }
func (e *entries) Push(each any)     { *e = append(*e, each.(entry)) }
func (e *entries) Pop() any {
	last := (*e)[len(*e)-1]
	*e = (*e)[:len(*e)-1]
	return last
}
