// HTTP/1.1 load from one thread: keep-alive connections over epoll, closed-loop or at an offered rate.
//
//   load HOST PORT CONNECTIONS RATE WARM_S SECONDS SEED < requests
//
// stdin: whole requests, each after its length (uint32, little-endian); they are sent in turn. RATE 0: each connection sends its
// next request when the last is answered, and latency counts from there. Else requests are due at Poisson times of RATE a second,
// whether or not earlier ones are answered: one that is due goes to a free connection or waits for one, and its latency counts
// from when it was due, so that a stall of the server is felt by all requests that a real client would have sent meanwhile.
//
// stdout: one line of JSON, then four float32 for each request that was due (closed loop: answered) within SECONDS after WARM_S
// and answered with 2xx: its latency; how much of that it was not sent yet, as this program was late or no connection was free;
// how much this program was late, whether or not a connection was free; and when it was due after `begin_s`; all in microseconds.
// A request still open 2 s after the end counts as `unanswered`.

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

enum { BUFFER = 1 << 20, PATIENCE_NS = 2000000000 };

typedef struct {
  int fd, busy, measured;
  int64_t due, seen, sent; // ns; latency counts from when it was due, which this program saw later
  const char *out;         // the request being sent
  size_t out_len, out_at;
  char *in;
  size_t in_len, want;     // want: bytes of the whole answer, 0 until its head is complete
  int status;
} Connection;

static struct sockaddr_storage target;
static socklen_t target_size;
static int poll_fd;
static char **requests;
static uint32_t *lengths;
static size_t request_count, next_request;
typedef struct { int64_t due, seen; } Due;
typedef struct { float latency, unsent, late, due; } Kept;
static Kept *answers;
static size_t kept, room;
static Due *waiting;       // those that found no free connection: a ring
static size_t waiting_head, waiting_count, waiting_room = 1 << 16;
static int64_t begin, end;
static long reconnects, status_counts[600];

static int64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void fail(const char *what) {
  fprintf(stderr, "load: %s: %s\n", what, strerror(errno));
  exit(1);
}

static void connect_to(Connection *c) {
  c->fd = socket(target.ss_family, SOCK_STREAM, 0);
  for (int tries = 0; connect(c->fd, (struct sockaddr *)&target, target_size) != 0; tries++) {
    if (tries == 200) fail("connect");
    usleep(10000);
  }
  int one = 1;
  setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  fcntl(c->fd, F_SETFL, O_NONBLOCK);
  struct epoll_event event = {.events = EPOLLIN | EPOLLRDHUP, .data.ptr = c};
  if (epoll_ctl(poll_fd, EPOLL_CTL_ADD, c->fd, &event) != 0) fail("epoll");
  c->in_len = c->want = 0;
}

static void watch(Connection *c, uint32_t events) {
  struct epoll_event event = {.events = events, .data.ptr = c};
  epoll_ctl(poll_fd, EPOLL_CTL_MOD, c->fd, &event);
}

static void push_out(Connection *c) {
  while (c->out_at < c->out_len) {
    ssize_t n = send(c->fd, c->out + c->out_at, c->out_len - c->out_at, MSG_NOSIGNAL);
    if (n < 0) {
      if (errno == EAGAIN) watch(c, EPOLLIN | EPOLLOUT | EPOLLRDHUP);
      return;  // any other error also shows as a hang-up
    }
    c->out_at += n;
  }
}

static void start(Connection *c, Due of) {
  c->busy = 1;
  c->due = of.due, c->seen = of.seen;
  c->sent = now_ns();
  c->measured = of.due >= begin && of.due < end;
  c->out = requests[next_request];
  c->out_len = lengths[next_request];
  c->out_at = c->in_len = c->want = 0;
  next_request = (next_request + 1) % request_count;
  push_out(c);
}

static void reconnect(Connection *c) {  // a server may close an idle connection, HAProxy does so when it reloads: send it anew
  close(c->fd);
  reconnects++;
  connect_to(c);
  if (c->busy) {
    c->out_at = 0;
    push_out(c);
  }
}

static void keep(const Connection *c, int64_t now) {
  if (kept == room) answers = realloc(answers, (room = room ? 2 * room : 1 << 16) * sizeof *answers);
  answers[kept++] = (Kept){(now - c->due) / 1e3f, (c->sent - c->due) / 1e3f, (c->seen - c->due) / 1e3f, (c->due - begin) / 1e3f};
}

static void read_head(Connection *c) {
  char *stop = memmem(c->in, c->in_len, "\r\n\r\n", 4);
  if (!stop) return;
  *stop = 0;
  c->status = atoi(c->in + 9);
  char *length = strcasestr(c->in, "\r\ncontent-length:");
  if (!length) {
    fprintf(stderr, "load: got an answer without Content-Length: %s\n", c->in);
    exit(1);
  }
  c->want = stop + 4 - c->in + strtoul(length + 17, NULL, 10);
  if (c->want > BUFFER) fail("answer too large");
}

// Reads what there is; 1 once the answer is complete.
static int pull_in(Connection *c) {
  for (;;) {
    ssize_t n = recv(c->fd, c->in + c->in_len, BUFFER - c->in_len, 0);
    if (n == 0 || (n < 0 && errno != EAGAIN)) {
      reconnect(c);
      return 0;
    }
    if (n < 0) return 0;
    c->in_len += n;
    if (!c->want) read_head(c);
    if (c->want && c->in_len >= c->want) return 1;
  }
}

static Due at_once(void) {
  const int64_t now = now_ns();
  return (Due){now, now};
}

int main(int argc, char **argv) {
  if (argc != 8) return fprintf(stderr, "load: expected HOST or /PATH, PORT CONNECTIONS RATE WARM_S SECONDS SEED\n"), 2;
  int count = atoi(argv[3]);
  double rate = atof(argv[4]);
  if (argv[1][0] == '/') {  // a Unix socket
    struct sockaddr_un *file = (struct sockaddr_un *)&target;
    file->sun_family = AF_UNIX;
    strncpy(file->sun_path, argv[1], sizeof file->sun_path - 1);
    target_size = sizeof *file;
  } else {
    struct sockaddr_in *port = (struct sockaddr_in *)&target;
    port->sin_family = AF_INET;
    port->sin_port = htons(atoi(argv[2]));
    inet_pton(AF_INET, argv[1], &port->sin_addr);
    target_size = sizeof *port;
  }
  srand48(atol(argv[7]));
  uint32_t length;
  while (fread(&length, 4, 1, stdin) == 1) {
    requests = realloc(requests, (request_count + 1) * sizeof *requests);
    lengths = realloc(lengths, (request_count + 1) * sizeof *lengths);
    requests[request_count] = malloc(length);
    lengths[request_count] = length;
    if (fread(requests[request_count++], 1, length, stdin) != length) fail("requests");
  }
  if (!request_count) return fprintf(stderr, "load: expected requests on stdin\n"), 2;
  poll_fd = epoll_create1(0);
  waiting = malloc(waiting_room * sizeof *waiting);
  Connection *all = calloc(count, sizeof *all), **idle = malloc(count * sizeof *idle);
  int idle_count = 0;
  for (int i = 0; i < count; i++) {
    all[i].in = malloc(BUFFER + 1);
    connect_to(&all[i]);
    idle[idle_count++] = &all[i];
  }
  int timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK);
  struct epoll_event wake = {.events = EPOLLIN, .data.ptr = NULL};
  epoll_ctl(poll_fd, EPOLL_CTL_ADD, timer, &wake);
  next_request = lrand48() % request_count;
  int64_t first = now_ns();
  begin = first + (int64_t)(atof(argv[5]) * 1e9);
  end = begin + (int64_t)(atof(argv[6]) * 1e9);
  int64_t due = first, answered = 0, answered_in_all = 0;
  if (rate == 0)
    while (idle_count) start(idle[--idle_count], at_once());
  for (;;) {
    int64_t now = now_ns();
    if (rate > 0) {
      while (due <= now && due < end) {
        if (idle_count) {
          start(idle[--idle_count], (Due){due, now});
        } else {
          if (waiting_count == waiting_room) {
            Due *more = malloc(2 * waiting_room * sizeof *more);
            for (size_t i = 0; i < waiting_count; i++) more[i] = waiting[(waiting_head + i) % waiting_room];
            free(waiting);
            waiting = more, waiting_head = 0, waiting_room *= 2;
          }
          waiting[(waiting_head + waiting_count++) % waiting_room] = (Due){due, now};
        }
        due += (int64_t)(-log(1 - drand48()) / rate * 1e9);
      }
      struct itimerspec at = {.it_value = {due / 1000000000, due % 1000000000}};
      if (due < end) timerfd_settime(timer, TFD_TIMER_ABSTIME, &at, NULL);
      if (due >= end && idle_count == count) break;
      if (now > end + PATIENCE_NS) break;
    } else if (now >= end) {
      break;
    }
    struct epoll_event events[256];
    int found = epoll_wait(poll_fd, events, 256, 50);
    now = now_ns();
    for (int i = 0; i < found; i++) {
      Connection *c = events[i].data.ptr;
      if (!c) {
        uint64_t ticks;
        (void)!read(timer, &ticks, 8);
        continue;
      }
      if (events[i].events & EPOLLOUT) {
        watch(c, EPOLLIN | EPOLLRDHUP);
        push_out(c);
      }
      if (!(events[i].events & (EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLERR)) || !pull_in(c)) continue;
      if (!c->busy) continue;
      now = now_ns();
      int measured = rate > 0 ? c->measured : now >= begin && now < end;
      if (measured) status_counts[c->status < 600 ? c->status : 599]++;
      if (measured && c->status / 100 == 2) keep(c, now);
      const int good = c->status / 100 == 2;
      answered += now >= begin && now < end && good;
      answered_in_all += good;
      c->busy = 0;
      if (rate == 0) {
        start(c, at_once());
      } else if (waiting_count) {
        const Due was_due = waiting[waiting_head];
        waiting_head = (waiting_head + 1) % waiting_room;
        waiting_count--;
        start(c, was_due);
      } else {
        idle[idle_count++] = c;
      }
    }
  }
  long unanswered = 0;
  if (rate > 0) {
    for (int i = 0; i < count; i++) unanswered += all[i].busy && all[i].measured;
    for (size_t i = 0; i < waiting_count; i++) unanswered += waiting[(waiting_head + i) % waiting_room].due >= begin;
  }
  struct rusage used;
  getrusage(RUSAGE_SELF, &used);
  double cpu = used.ru_utime.tv_sec + used.ru_stime.tv_sec + (used.ru_utime.tv_usec + used.ru_stime.tv_usec) / 1e6;
  printf("{\"answered\": %ld, \"seconds\": %.6f, \"unanswered\": %ld, \"reconnects\": %ld, \"cpu_share\": %.4f, ", (long)answered,
         (end - begin) / 1e9, unanswered, reconnects, cpu / ((now_ns() - first) / 1e9));
  printf("\"answered_in_all\": %ld, \"begin_s\": %.6f, \"kept\": %zu, \"status\": {", (long)answered_in_all, begin / 1e9, kept);
  const char *comma = "";
  for (int i = 0; i < 600; i++)
    if (status_counts[i]) printf("%s\"%d\": %ld", comma, i, status_counts[i]), comma = ", ";
  printf("}}\n");
  fwrite(answers, sizeof *answers, kept, stdout);
  return 0;
}
