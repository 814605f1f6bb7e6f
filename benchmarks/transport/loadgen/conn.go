package main

import (
	"bufio"
	"bytes"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

const (
	preface          = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
	frameHeaderBytes = 9
	streamWindow     = 16 << 20 // as Envoy grants by default
	connectionWindow = 24 << 20
	defaultWindow    = 65_535
	readerBytes      = 1 << 17
	messagePrefix    = 5
)

// conn is one HTTP/2 connection. All that it does happens under its lock, in the goroutine that reads or in the one
// that keeps the time, and writes into `out`; a goroutine of its own brings `out` to the socket.
type conn struct {
	mu      sync.Mutex
	socket  net.Conn
	out     []byte
	wake    chan struct{}
	block   bytes.Buffer
	encoder *hpack.Encoder
	decoder *hpack.Decoder
	status  string // grpc-status of the header block that is being decoded

	streams       map[uint32]*stream
	nextID        uint32
	window        int64
	initialWindow int64
	maxFrame      int
	maxStreams    uint32
	starved       []*stream // wait for a window of the connection
	received      int
	ready         chan struct{} // closed at the server's first SETTINGS
	broken        error
	lost          func(error)
}

// stream is one gRPC call. `message` hears of each message, under the lock; the bytes are good until it returns.
type stream struct {
	id       uint32
	conn     *conn
	window   int64
	pending  []byte
	finish   bool // half-close after what is pending
	starved  bool
	partial  []byte
	received int
	waiting  func() bool // for the server
	message  func([]byte)
	ended    func(grpcStatus string, err error)
}

func dial(address string, secure bool, lost func(error)) (*conn, error) {
	socket, err := net.Dial("tcp", address)
	if err != nil {
		return nil, err
	}
	if secure {
		// The server is one of this machine, with a certificate of its own making.
		session := tls.Client(socket, &tls.Config{InsecureSkipVerify: true, NextProtos: []string{"h2"}})
		if err := session.Handshake(); err != nil {
			return nil, err
		}
		if session.ConnectionState().NegotiatedProtocol != "h2" {
			return nil, errors.New("the server did not agree to h2")
		}
		socket = session
	}
	c := &conn{
		socket: socket, wake: make(chan struct{}, 1), streams: map[uint32]*stream{}, nextID: 1,
		window: defaultWindow, initialWindow: defaultWindow, maxFrame: 16_384, maxStreams: 1<<32 - 1,
		ready: make(chan struct{}), lost: lost,
	}
	c.encoder = hpack.NewEncoder(&c.block)
	c.decoder = hpack.NewDecoder(4096, func(field hpack.HeaderField) {
		if field.Name == "grpc-status" {
			c.status = field.Value
		}
	})
	c.out = append(c.out, preface...)
	c.out = frame(c.out, http2.FrameSettings, 0, 0, 12)
	c.out = binary.BigEndian.AppendUint16(c.out, uint16(http2.SettingInitialWindowSize))
	c.out = binary.BigEndian.AppendUint32(c.out, streamWindow)
	c.out = binary.BigEndian.AppendUint16(c.out, uint16(http2.SettingEnablePush))
	c.out = binary.BigEndian.AppendUint32(c.out, 0)
	c.grant(0, connectionWindow-defaultWindow)
	c.flush()
	go c.write()
	go c.read()
	<-c.ready
	c.mu.Lock()
	defer c.mu.Unlock()
	return c, c.broken
}

// open starts a call. The lock is held, as for all that follows.
func (c *conn) open(fields []hpack.HeaderField) *stream {
	s := &stream{id: c.nextID, conn: c, window: c.initialWindow}
	c.nextID += 2
	c.streams[s.id] = s
	c.block.Reset()
	for _, field := range fields {
		must(c.encoder.WriteField(field))
	}
	c.out = frame(c.out, http2.FrameHeaders, http2.FlagHeadersEndHeaders, s.id, c.block.Len())
	c.out = append(c.out, c.block.Bytes()...)
	return s
}

// send brings a framed message on its way, as far as the windows let it.
func (s *stream) send(message []byte) {
	if len(s.pending) > 0 {
		s.pending = append(s.pending, message...)
		return
	}
	if rest := s.push(message); len(rest) > 0 {
		s.pending = append(s.pending, rest...)
	}
}

func (s *stream) push(data []byte) []byte {
	c := s.conn
	for len(data) > 0 {
		n := min(int64(len(data)), int64(c.maxFrame), s.window, c.window)
		if n <= 0 {
			if s.window > 0 && !s.starved {
				s.starved = true
				c.starved = append(c.starved, s)
			}
			return data
		}
		c.out = append(frame(c.out, http2.FrameData, 0, s.id, int(n)), data[:n]...)
		s.window -= n
		c.window -= n
		data = data[n:]
	}
	return nil
}

func (s *stream) resume() {
	s.starved = false
	s.pending = s.push(s.pending)
	if len(s.pending) == 0 && s.finish {
		s.halfClose()
	}
}

func (s *stream) halfClose() {
	s.finish = len(s.pending) > 0
	if !s.finish {
		s.conn.out = frame(s.conn.out, http2.FrameData, http2.FlagDataEndStream, s.id, 0)
	}
}

func (s *stream) reset() {
	s.conn.out = frame(s.conn.out, http2.FrameRSTStream, 0, s.id, 4)
	s.conn.out = binary.BigEndian.AppendUint32(s.conn.out, uint32(http2.ErrCodeCancel))
	s.forget()
}

func (s *stream) forget() {
	delete(s.conn.streams, s.id)
	s.pending, s.finish = nil, false
}

func (c *conn) grant(id uint32, n int) {
	c.out = frame(c.out, http2.FrameWindowUpdate, 0, id, 4)
	c.out = binary.BigEndian.AppendUint32(c.out, uint32(n))
}

func frame(to []byte, kind http2.FrameType, flags http2.Flags, id uint32, length int) []byte {
	to = append(to, byte(length>>16), byte(length>>8), byte(length), byte(kind), byte(flags))
	return binary.BigEndian.AppendUint32(to, id)
}

// flush lets what was written go. It does not wait.
func (c *conn) flush() {
	if len(c.out) > 0 {
		select {
		case c.wake <- struct{}{}:
		default:
		}
	}
}

func (c *conn) write() {
	var writing []byte
	for range c.wake {
		c.mu.Lock()
		writing, c.out = c.out, writing[:0]
		c.mu.Unlock()
		if _, err := c.socket.Write(writing); err != nil {
			c.fail(err)
			return
		}
	}
}

// read takes frames until the connection is over. What the frames of one read bring forth goes out together.
func (c *conn) read() {
	reader := bufio.NewReaderSize(c.socket, readerBytes)
	framer := http2.NewFramer(io.Discard, reader)
	framer.SetMaxReadFrameSize(1 << 20)
	framer.SetReuseFrames()
	for {
		got, err := framer.ReadFrame()
		if err != nil {
			c.fail(err)
			return
		}
		c.mu.Lock()
		for err == nil {
			err = c.take(got)
			if err != nil || reader.Buffered() < frameHeaderBytes {
				break
			}
			got, err = framer.ReadFrame()
		}
		c.flush()
		c.mu.Unlock()
		if err != nil {
			c.fail(err)
			return
		}
	}
}

func (c *conn) take(got http2.Frame) error {
	id := got.Header().StreamID
	switch got := got.(type) {
	case *http2.DataFrame:
		return c.data(id, got)
	case *http2.HeadersFrame:
		if !got.HeadersEnded() {
			return errors.New("a header block in several frames: none is so large")
		}
		c.status = ""
		if _, err := c.decoder.Write(got.HeaderBlockFragment()); err != nil {
			return err
		}
		if err := c.decoder.Close(); err != nil {
			return err
		}
		if s := c.streams[id]; s != nil && got.StreamEnded() {
			s.forget()
			s.ended(c.status, nil)
		}
	case *http2.RSTStreamFrame:
		if s := c.streams[id]; s != nil {
			s.forget()
			s.ended("", fmt.Errorf("the server reset the stream: %v", got.ErrCode))
		}
	case *http2.SettingsFrame:
		return c.settings(got)
	case *http2.WindowUpdateFrame:
		c.widen(id, int64(got.Increment))
	case *http2.PingFrame:
		if !got.IsAck() {
			c.out = append(frame(c.out, http2.FramePing, http2.FlagPingAck, 0, 8), got.Data[:]...)
		}
	case *http2.GoAwayFrame:
		return fmt.Errorf("the server sent GOAWAY: %v %q", got.ErrCode, got.DebugData())
	}
	return nil
}

func (c *conn) data(id uint32, got *http2.DataFrame) error {
	n := int(got.Header().Length)
	c.received += n
	if c.received > connectionWindow/2 {
		c.grant(0, c.received)
		c.received = 0
	}
	s := c.streams[id]
	if s == nil {
		return nil
	}
	if s.received += n; s.received > streamWindow/2 {
		c.grant(id, s.received)
		s.received = 0
	}
	s.take(got.Data())
	if got.StreamEnded() && c.streams[id] == s {
		s.forget()
		s.ended("", errors.New("the stream ended without trailers"))
	}
	return nil
}

// take finds the messages in what came, and keeps a part of one.
func (s *stream) take(data []byte) {
	if len(s.partial) > 0 {
		s.partial = append(s.partial, data...)
		data = s.partial
	}
	for len(data) >= messagePrefix {
		end := messagePrefix + int(binary.BigEndian.Uint32(data[1:]))
		if len(data) < end {
			break
		}
		s.message(data[messagePrefix:end])
		data = data[end:]
	}
	s.partial = append(s.partial[:0], data...)
}

func (c *conn) settings(got *http2.SettingsFrame) error {
	if got.IsAck() {
		return nil
	}
	err := got.ForeachSetting(func(setting http2.Setting) error {
		switch setting.ID {
		case http2.SettingInitialWindowSize:
			more := int64(setting.Val) - c.initialWindow
			c.initialWindow += more
			for _, s := range c.streams {
				s.window += more
			}
		case http2.SettingMaxFrameSize:
			c.maxFrame = min(int(setting.Val), 1<<16)
		case http2.SettingMaxConcurrentStreams:
			c.maxStreams = setting.Val
		case http2.SettingHeaderTableSize:
			c.encoder.SetMaxDynamicTableSizeLimit(setting.Val)
		}
		return nil
	})
	c.out = frame(c.out, http2.FrameSettings, http2.FlagSettingsAck, 0, 0)
	for _, s := range c.streams {
		s.resume()
	}
	select {
	case <-c.ready:
	default:
		close(c.ready)
	}
	return err
}

func (c *conn) widen(id uint32, more int64) {
	if id != 0 {
		if s := c.streams[id]; s != nil {
			s.window += more
			s.resume()
		}
		return
	}
	c.window += more
	waiting := c.starved
	c.starved = nil
	for _, s := range waiting {
		s.resume()
	}
}

// fail ends every call, once.
func (c *conn) fail(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.broken != nil {
		return
	}
	c.broken = err
	select {
	case <-c.ready:
	default:
		close(c.ready)
	}
	c.lost(err)
	for _, s := range c.streams {
		s.forget()
		s.ended("", fmt.Errorf("the connection is lost: %w", err))
	}
}
