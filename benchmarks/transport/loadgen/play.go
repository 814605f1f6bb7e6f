package main

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/net/http2/hpack"
)

// phase is what an exchange waits for.
type phase int

const (
	choice phase = iota
	questionBack
	answerHeadersBack
	answerBack
	trailers
	over
)

// script is what all exchanges of one kind do.
type script struct {
	questions   []question
	parts       []answerPart // empty: the exchange ends with the choice
	contentType string
	endless     bool          // the middle of `parts` is repeated until the load ends
	gap         time.Duration // between the parts, whether the replies have come or not; 0: see pipelined
	pipelined   bool          // all parts at once, in place of each after the reply to the one before
	halfClose   bool          // ends with a half-close and the server's trailers, in place of RST_STREAM
	traced      bool          // every stream brings headers of its own
	repeat      bool          // another exchange follows on this one's end
}

// load is all traffic of one run.
type load struct {
	clock     *clock
	authority string
	began     time.Time
	conns     []*conn
	players   int // that pace their parts, so that these can be spread over the gap
	together  int // players whose parts are due at one time, as those of one engine's step
	patience  time.Duration
	answering atomic.Int64 // exchanges that came to their answer
	ending    atomic.Bool  // nothing new is sent
	closing   atomic.Bool  // what fails now does so because of us
	measuring atomic.Bool

	picks, pairs, chats, opened, failures atomic.Int64

	mu      sync.Mutex
	texts   []string
	pickUs  []float64
	pairUs  []float64
	lateUs  []float64
	answers map[string][]byte
}

// exchange is one HTTP request as it passes the picker. Its methods run under its connection's lock.
type exchange struct {
	*script
	load     *load
	stream   *stream
	question *question
	phase    phase
	began    time.Time
	endpoint string
	back     int // bytes of the question that came back
	sent     int // parts of the answer
	replied  int
	sentAt   []time.Time // of parts whose replies are to come
	next     time.Time
}

const (
	mostTexts    = 5
	mostFailures = 1000
	startDelay   = 20 * time.Millisecond
	lookAgain    = 5 * time.Millisecond
)

func (l *load) start(c *conn, s *script) {
	if l.ending.Load() || c.broken != nil || l.failures.Load() > mostFailures {
		return
	}
	number := l.opened.Add(1)
	e := &exchange{script: s, load: l, question: &s.questions[int(number)%len(s.questions)], began: time.Now()}
	e.stream = c.open(l.fields(s.traced))
	e.stream.message, e.stream.ended, e.stream.waiting = e.message, e.ended, e.waiting
	for _, message := range e.question.messages {
		e.stream.send(message)
	}
}

// fields are the request headers of Envoy's gRPC client.
func (l *load) fields(traced bool) []hpack.HeaderField {
	fields := []hpack.HeaderField{
		{Name: ":method", Value: "POST"},
		{Name: ":scheme", Value: "http"},
		{Name: ":path", Value: "/envoy.service.ext_proc.v3.ExternalProcessor/Process"},
		{Name: ":authority", Value: l.authority},
		{Name: "te", Value: "trailers"},
		{Name: "content-type", Value: "application/grpc"},
		{Name: "x-envoy-internal", Value: "true"},
		{Name: "x-forwarded-for", Value: "10.0.0.9"},
	}
	if traced {
		fields = append(fields,
			hpack.HeaderField{Name: "traceparent", Value: fmt.Sprintf("00-%016x%016x-%016x-01", rand.Uint64(), rand.Uint64(), rand.Uint64())},
			hpack.HeaderField{Name: "x-request-id", Value: fmt.Sprintf("%08x-95f0-4a0b-8e0f-%012x", rand.Uint32(), rand.Uint64()>>16)})
	}
	return fields
}

func (e *exchange) message(reply []byte) {
	var err error
	switch e.phase {
	case choice:
		if e.endpoint, err = destinationOf(reply); err == nil {
			e.phase = questionBack
		}
	case questionBack:
		err = e.questionReply(reply)
	case answerHeadersBack:
		var kind, _, broken = kindOf(reply)
		if err = broken; err == nil && kind != responseHeadersReply {
			err = fmt.Errorf("answer headers were answered by a reply of kind %d", kind)
		}
		e.phase = answerBack
		e.sendParts()
	case answerBack:
		err = e.partReply(reply)
	case trailers:
		err = fmt.Errorf("one reply too many: %.80q", reply)
	}
	if err != nil {
		e.stream.reset()
		e.fail(err)
	}
}

func (e *exchange) questionReply(reply []byte) error {
	body, end, err := streamedBody(reply, requestBodyReply)
	if err != nil {
		return err
	}
	if err := same(body, e.question.body, e.back); err != nil {
		return err
	}
	if e.back += len(body); !end {
		return nil
	}
	if e.back != len(e.question.body) {
		return fmt.Errorf("of %d bytes of the body, %d came back", len(e.question.body), e.back)
	}
	e.load.picks.Add(1)
	e.load.note(&e.load.pickUs, time.Since(e.began))
	if len(e.parts) == 0 {
		e.finish()
		return nil
	}
	e.phase = answerHeadersBack
	e.stream.send(e.load.answerHeaders(e.contentType, e.endpoint))
	return nil
}

// sendParts sends the first, and those that wait for nobody.
func (e *exchange) sendParts() {
	share := e.load.answering.Add(1) % int64(e.load.players)
	share -= share % int64(e.load.together)
	switch {
	case e.gap > 0:
		passed := time.Since(e.load.began) / e.gap
		e.next = e.load.began.Add(e.gap*(passed+1) + e.gap*time.Duration(share)/time.Duration(e.load.players))
		e.load.clock.at(e.next, e.due)
	case e.pipelined:
		for range e.parts {
			e.sendPart(time.Now())
		}
	default:
		e.sendPart(time.Now())
	}
}

func (e *exchange) due(at time.Time) {
	c := e.stream.conn
	c.mu.Lock()
	defer c.mu.Unlock()
	if e.phase != answerBack || e.endless && e.load.ending.Load() {
		return
	}
	now := time.Now()
	e.load.note(&e.load.lateUs, now.Sub(at))
	e.sendPart(now)
	c.flush()
	if e.endless || e.sent < len(e.parts) {
		e.next = e.next.Add(e.gap)
		e.load.clock.at(e.next, e.due)
	}
}

func (e *exchange) sendPart(now time.Time) {
	e.stream.send(e.part(e.sent).message)
	e.sentAt = append(e.sentAt, now)
	e.sent++
}

// part is the i-th of the answer. An endless one goes through the words again and again.
func (e *exchange) part(i int) *answerPart {
	if e.endless && i > 0 {
		i = 1 + (i-1)%wordChunks
	}
	return &e.parts[i]
}

func (e *exchange) partReply(reply []byte) error {
	if e.replied == e.sent {
		return fmt.Errorf("one reply too many: %.80q", reply)
	}
	body, end, err := streamedBody(reply, responseBodyReply)
	if err != nil {
		return err
	}
	part := e.part(e.replied)
	if len(body) != len(part.body) || end != part.end {
		return fmt.Errorf("%d bytes came back for %d of an answer, end %v for %v", len(body), len(part.body), end, part.end)
	}
	if err := same(body, part.body, 0); err != nil {
		return err
	}
	now := time.Now()
	e.load.pairs.Add(1)
	e.load.note(&e.load.pairUs, now.Sub(e.sentAt[0]))
	e.sentAt = e.sentAt[:copy(e.sentAt, e.sentAt[1:])]
	e.replied++
	switch {
	case !e.endless && e.replied == len(e.parts):
		e.load.chats.Add(1)
		e.finish()
	case e.gap == 0 && !e.pipelined && !(e.endless && e.load.ending.Load()):
		e.sendPart(now)
	}
	return nil
}

// waiting is false where all that was sent is answered, though the answer is not at its end.
func (e *exchange) waiting() bool {
	return !(e.endless && e.phase == answerBack && e.replied == e.sent)
}

func (e *exchange) finish() {
	if e.halfClose {
		e.phase = trailers
		e.stream.halfClose()
		return
	}
	e.stream.reset()
	e.again()
}

func (e *exchange) ended(status string, err error) {
	switch {
	case e.phase == over:
	case err != nil:
		e.fail(err)
	case e.phase != trailers || status != "0":
		e.fail(fmt.Errorf("the server ended the stream early, or not well: status %q", status))
	default:
		e.again()
	}
}

func (e *exchange) fail(err error) {
	e.load.failed(err)
	e.again()
}

func (e *exchange) again() {
	e.phase = over
	if e.repeat {
		e.load.start(e.stream.conn, e.script)
	}
}

func (l *load) failed(err error) {
	if l.closing.Load() {
		return
	}
	l.failures.Add(1)
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.texts) < mostTexts {
		l.texts = append(l.texts, err.Error())
	}
}

func (l *load) note(to *[]float64, took time.Duration) {
	if l.measuring.Load() {
		l.mu.Lock()
		*to = append(*to, float64(took)/1e3)
		l.mu.Unlock()
	}
}

func (l *load) answerHeaders(contentType, endpoint string) []byte {
	l.mu.Lock()
	defer l.mu.Unlock()
	made := l.answers[endpoint]
	if made == nil {
		made = answerHeaders(contentType, endpoint)
		l.answers[endpoint] = made
	}
	return made
}

// keep has `count` exchanges going on at a time.
func (l *load) keep(count int, s *script) {
	s.repeat = true
	for i := range count {
		c := l.conns[i%len(l.conns)]
		c.mu.Lock()
		l.start(c, s)
		c.flush()
		c.mu.Unlock()
	}
}

// every starts exchanges at a rate, however the ones before fare.
func (l *load) every(gap time.Duration, s *script) {
	var next func(time.Time)
	number := 0
	next = func(at time.Time) {
		if l.ending.Load() {
			return
		}
		c := l.conns[number%len(l.conns)]
		number++
		c.mu.Lock()
		l.note(&l.lateUs, time.Since(at))
		l.start(c, s)
		c.flush()
		c.mu.Unlock()
		l.clock.at(at.Add(gap), next)
	}
	l.clock.at(time.Now().Add(startDelay), next)
}

// settle waits until `count` exchanges have come to their answer.
func (l *load) settle(count int) {
	for deadline := time.Now().Add(l.patience); l.answering.Load() < int64(count); time.Sleep(lookAgain) {
		if time.Now().After(deadline) {
			l.failed(fmt.Errorf("of %d exchanges, %d came to their answer in %v", count, l.answering.Load(), l.patience))
			return
		}
	}
}

// end starts nothing more, and waits for the replies to all that was sent.
func (l *load) end() {
	l.ending.Store(true)
	for deadline := time.Now().Add(l.patience); ; time.Sleep(lookAgain) {
		waiting := 0
		for _, c := range l.conns {
			c.mu.Lock()
			for _, s := range c.streams {
				if s.waiting() {
					waiting++
				}
			}
			c.mu.Unlock()
		}
		if waiting == 0 {
			break
		}
		if time.Now().After(deadline) {
			l.failed(fmt.Errorf("%d exchanges got no reply in %v", waiting, l.patience))
			break
		}
	}
	l.closing.Store(true)
}
