// Loadgen speaks ext-proc to a server on this machine as Envoy does, a stream an HTTP request over few connections,
// checks every reply, and tells in one line of JSON what came back, how fast, and what the server used meanwhile.
//
// It writes its own HTTP/2 frames and sends messages that were made before, so that it costs a server less than it
// costs the server: a client that is the bottleneck would measure itself.
package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"log"
	"net"
	"os"
	"runtime/debug"
	"slices"
	"time"
)

const garbagePercent = 800

type options struct {
	address     string
	pid         int
	connections int
	secure      bool
	streams     int
	parts       int
	gap         time.Duration
	together    int
	pipelined   bool
	rate        float64
	bodyBytes   int
	rateBytes   int
	halfClose   bool
	traced      bool
	warm        time.Duration
	measured    time.Duration
	patience    time.Duration
}

type percentiles struct {
	P50 float64 `json:"p50"`
	P99 float64 `json:"p99"`
	Max float64 `json:"max"`
}

type result struct {
	Seconds     float64     `json:"seconds"`
	Picks       int64       `json:"picks"`
	Pairs       int64       `json:"pairs"`
	Chats       int64       `json:"chats"`
	Failures    int64       `json:"failures"`
	Texts       []string    `json:"failure_texts"`
	ServerUs    float64     `json:"server_cpu_us"`
	UserUs      float64     `json:"server_user_us"`
	SystemUs    float64     `json:"server_system_us"`
	ClientUs    float64     `json:"client_cpu_us"`
	PickUs      percentiles `json:"pick_us"`
	PairUs      percentiles `json:"pair_us"`
	LateUs      percentiles `json:"late_us"`
	ResidentMib float64     `json:"resident_mib"`
	PeakMib     float64     `json:"peak_mib"`
}

func parse() options {
	var o options
	flag.StringVar(&o.address, "address", "", "loopback address of the server")
	flag.IntVar(&o.pid, "pid", 0, "process of the server")
	flag.IntVar(&o.connections, "connections", 1, "connections that the streams share")
	flag.BoolVar(&o.secure, "tls", false, "TLS; any certificate will do")
	flag.IntVar(&o.streams, "streams", 0, "exchanges that go on at a time, each followed by another")
	flag.IntVar(&o.parts, "chunks", 0,
		"chunks of each answer: 0 no answer, 1 one in one piece, -1 without end, else at least 4")
	flag.DurationVar(&o.gap, "gap", 0, "time between the chunks of an answer; 0: each after the reply to the one before")
	flag.IntVar(&o.together, "together", 1,
		"with a gap, streams whose chunks are due at one time, as of one engine's step; others are spread evenly")
	flag.BoolVar(&o.pipelined, "pipelined", false, "without a gap, all chunks at once")
	flag.Float64Var(&o.rate, "rate", 0, "exchanges without answer that are started a second, besides")
	flag.IntVar(&o.bodyBytes, "body", 1000, "bytes of a request's body")
	flag.IntVar(&o.rateBytes, "rate-body", 0, "the same of those of -rate; 0: as -body")
	flag.BoolVar(&o.halfClose, "half-close", false, "end streams by half-close; they are reset otherwise")
	flag.BoolVar(&o.traced, "traced", false, "traceparent and x-request-id on each stream")
	flag.DurationVar(&o.warm, "warm", time.Second, "time before measuring")
	flag.DurationVar(&o.measured, "time", 5*time.Second, "time of measuring; goes on until something came back")
	flag.DurationVar(&o.patience, "patience", 60*time.Second, "how long a reply may take")
	flag.Parse()
	host, _, err := net.SplitHostPort(o.address)
	switch ip := net.ParseIP(host); {
	case err != nil || ip == nil || !ip.IsLoopback():
		log.Fatalf("-address %q: give address:port on loopback", o.address)
	case o.pid <= 0:
		log.Fatal("-pid: give the process of the server")
	case o.together < 1 || o.connections < 1:
		log.Fatal("-together, -connections: give 1 or more")
	case o.streams == 0 && o.rate == 0:
		log.Fatal("nothing to do: give -streams or -rate")
	case o.parts < -1 || o.parts == 2 || o.parts == 3:
		log.Fatalf("-chunks %d: give -1, 0, 1, or 4 and more", o.parts)
	}
	return o
}

// picks says whether choices go on for as long as the load does.
func (o options) picks() bool { return o.parts >= 0 && o.streams > 0 || o.rate > 0 }

func (o options) pairs() bool { return o.parts != 0 && o.streams > 0 }

func main() {
	log.SetFlags(0)
	o := parse()
	debug.SetGCPercent(garbagePercent)
	l := &load{clock: newClock(), authority: o.address, players: max(o.streams, 1), together: o.together, patience: o.patience, answers: map[string][]byte{}}
	for range o.connections {
		c, err := dial(o.address, o.secure, l.failed)
		if err != nil {
			log.Fatal(err)
		}
		if int64(o.streams) > int64(c.maxStreams)*int64(o.connections) {
			log.Fatalf("the server takes %d streams a connection", c.maxStreams)
		}
		l.conns = append(l.conns, c)
	}
	l.begin(o)
	if o.parts < 0 { // what is measured is chunks alone
		l.settle(o.streams)
	}
	time.Sleep(o.warm)
	told := l.measure(o)
	l.end()
	told.Failures, told.Texts = l.failures.Load(), append([]string{}, l.texts...)
	if told.Picks+told.Pairs == 0 {
		told.Failures++
		told.Texts = append(told.Texts, fmt.Sprintf("nothing came back in %v", o.measured))
	}
	must(json.NewEncoder(os.Stdout).Encode(told))
	if told.Failures > 0 {
		os.Exit(1)
	}
}

func (l *load) begin(o options) {
	l.began = time.Now()
	s := script{
		questions: questions(variants(o.bodyBytes), o.bodyBytes), contentType: "text/event-stream; charset=utf-8",
		gap: o.gap, pipelined: o.pipelined, halfClose: o.halfClose, traced: o.traced,
	}
	switch {
	case o.parts == 1:
		s.parts, s.contentType = plainAnswer(), "application/json"
	case o.parts > 1:
		s.parts = streamedAnswer(o.parts)
	case o.parts < 0:
		s.parts, s.endless = streamedAnswer(wordChunks+4), true
	}
	l.keep(o.streams, &s)
	if o.rate > 0 {
		beside := script{questions: s.questions, halfClose: o.halfClose, traced: o.traced}
		if o.rateBytes > 0 {
			beside.questions = questions(variants(o.rateBytes), o.rateBytes)
		}
		l.every(time.Duration(float64(time.Second)/o.rate), &beside)
	}
}

// variants is how many different bodies are made of a size.
func variants(bodyBytes int) int {
	return max(4, min(200, 4_000_000/max(bodyBytes, 1)))
}

func (l *load) measure(o options) result {
	before, own, picks, pairs, chats := usageOf(o.pid), ownCPUUs(), l.picks.Load(), l.pairs.Load(), l.chats.Load()
	began := time.Now()
	l.measuring.Store(true)
	time.Sleep(o.measured)
	came := func() bool {
		return (!o.picks() || l.picks.Load() > picks) && (!o.pairs() || l.pairs.Load() > pairs)
	}
	for deadline := began.Add(o.patience); !came() && l.failures.Load() == 0 && time.Now().Before(deadline); {
		time.Sleep(lookAgain)
	}
	l.measuring.Store(false)
	took := time.Since(began)
	told := result{
		Seconds: took.Seconds(), Picks: l.picks.Load() - picks, Pairs: l.pairs.Load() - pairs,
		Chats: l.chats.Load() - chats, ClientUs: ownCPUUs() - own,
	}
	used := usageOf(o.pid).less(before)
	told.ServerUs, told.UserUs, told.SystemUs = used.cpuUs, used.userUs, used.systemUs
	told.ResidentMib, told.PeakMib = memory(o.pid)
	l.mu.Lock()
	defer l.mu.Unlock()
	told.PickUs, told.PairUs, told.LateUs = spread(l.pickUs), spread(l.pairUs), spread(l.lateUs)
	return told
}

func spread(values []float64) percentiles {
	if len(values) == 0 {
		return percentiles{}
	}
	slices.Sort(values)
	at := func(share float64) float64 { return values[min(int(share*float64(len(values))), len(values)-1)] }
	return percentiles{at(0.5), at(0.99), values[len(values)-1]}
}
