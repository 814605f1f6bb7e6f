package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
)

const ticksPerSecond = 100 // of /proc, whatever the kernel's own

// usage is what a process and its children have used so far.
type usage struct {
	cpuUs    float64 // exact, of threads that live
	userUs   float64 // in ticks
	systemUs float64
}

func (u usage) less(before usage) usage {
	return usage{u.cpuUs - before.cpuUs, u.userUs - before.userUs, u.systemUs - before.systemUs}
}

func usageOf(pid int) usage {
	var sum usage
	for _, each := range family(pid) {
		schedules, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", each))
		for _, file := range schedules {
			if fields := fieldsOf(file); len(fields) > 0 {
				ns, _ := strconv.ParseFloat(fields[0], 64)
				sum.cpuUs += ns / 1e3
			}
		}
		text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", each))
		if _, after, found := strings.Cut(string(text), ") "); found {
			fields := strings.Fields(after)
			user, _ := strconv.ParseFloat(fields[11], 64)
			system, _ := strconv.ParseFloat(fields[12], 64)
			sum.userUs += user * 1e6 / ticksPerSecond
			sum.systemUs += system * 1e6 / ticksPerSecond
		}
	}
	return sum
}

func ownCPUUs() float64 {
	var used syscall.Rusage
	must(syscall.Getrusage(syscall.RUSAGE_SELF, &used))
	return float64(used.Utime.Nano()+used.Stime.Nano()) / 1e3
}

// memory is what a process and its children hold now, and the most that the process alone has held, in MiB.
func memory(pid int) (resident, peak float64) {
	for _, each := range family(pid) {
		text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", each))
		for _, line := range strings.Split(string(text), "\n") {
			fields := strings.Fields(line)
			if len(fields) < 2 {
				continue
			}
			kib, _ := strconv.ParseFloat(fields[1], 64)
			switch {
			case fields[0] == "VmRSS:":
				resident += kib / 1024
			case fields[0] == "VmHWM:" && each == pid:
				peak = kib / 1024
			}
		}
	}
	return resident, peak
}

func family(pid int) []int {
	all := []int{pid}
	lists, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
	for _, list := range lists {
		for _, child := range fieldsOf(list) {
			if number, err := strconv.Atoi(child); err == nil {
				all = append(all, family(number)...)
			}
		}
	}
	return all
}

func fieldsOf(file string) []string {
	text, _ := os.ReadFile(file)
	return strings.Fields(string(text))
}
