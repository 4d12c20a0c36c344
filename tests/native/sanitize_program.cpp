// Calls every function of native/ where overruns show: each buffer is its own allocation of exactly its size, so that
// AddressSanitizer knows its ends, and in a second round it ends (or begins) at a page that may not be touched, so
// that the processor knows them too, for what no compiler instruments (streaming stores). Every result is compared
// with a bit-by-bit checksum. Without arguments all is run; `overrun-read`, `overrun-write`, `overrun-stream` and
// `undefined` do what must be noticed. Ends with 0 only when everything was right.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "copy_crc32c.h"
#include "crc32c.h"
#include "receive.h"

using namespace replicator;

namespace {

void expect(bool truth, const char* what, std::size_t size, std::size_t detail) {
  if (truth) return;
  std::fprintf(stderr, "wrong: %s, at size %zu (%zu)\n", what, size, detail);
  std::exit(1);
}

// Repeatable bytes (xorshift).
std::vector<std::uint8_t> noise(std::size_t size, std::uint64_t state) {
  std::vector<std::uint8_t> bytes(size);
  for (std::uint8_t& byte : bytes) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    byte = static_cast<std::uint8_t>(state >> 32);
  }
  return bytes;
}

// The definition, a bit at a time: shares nothing with native/.
std::uint32_t by_bits(std::uint32_t value, Bytes data) {
  std::uint32_t state = ~value;
  for (const std::uint8_t byte : data) {
    state ^= byte;
    for (int bit = 0; bit < 8; ++bit) state = (state & 1) != 0 ? state >> 1 ^ 0x82F63B78u : state >> 1;
  }
  return ~state;
}

enum class Place { kHeap, kBeforeWall, kAfterWall };
constexpr Place kPlaces[] = {Place::kHeap, Place::kBeforeWall, Place::kAfterWall};

// `size` bytes with nothing behind them (or, after a wall, nothing before them) that may be touched.
class Room {
 public:
  Room(std::size_t size, Place place) : size_(size) {
    if (place == Place::kHeap) {
      heap_ = std::make_unique<std::uint8_t[]>(size);
      data_ = heap_.get();
      return;
    }
    const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    const std::size_t usable = (size + page - 1) / page * page;
    mapped_ = usable + 2 * page;
    void* at = mmap(nullptr, mapped_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    expect(at != MAP_FAILED, "mmap", size, 0);
    map_ = static_cast<std::uint8_t*>(at);
    expect(usable == 0 || mprotect(map_ + page, usable, PROT_READ | PROT_WRITE) == 0, "mprotect", size, 0);
    data_ = map_ + page + (place == Place::kBeforeWall ? usable - size : 0);
  }
  ~Room() {
    if (map_ != nullptr) munmap(map_, mapped_);
  }
  Room(const Room&) = delete;
  Room& operator=(const Room&) = delete;

  std::uint8_t* data() const { return data_; }
  std::span<std::uint8_t> span() const { return {data_, size_}; }
  void fill(Bytes bytes) const {
    if (!bytes.empty()) std::memcpy(data_, bytes.data(), bytes.size());
  }
  bool holds(Bytes bytes) const { return bytes.empty() || std::memcmp(data_, bytes.data(), bytes.size()) == 0; }

 private:
  std::size_t size_;
  std::unique_ptr<std::uint8_t[]> heap_;
  std::uint8_t* map_ = nullptr;
  std::size_t mapped_ = 0;
  std::uint8_t* data_ = nullptr;
};

std::vector<std::size_t> sizes_up_to(std::size_t most) {
  std::vector<std::size_t> sizes;
  for (std::size_t size = 0; size <= 300; ++size) sizes.push_back(size);
  for (const std::size_t about : {512, 1024, 2048, 4096, 3 * 4096, 32 << 10, 1 << 20}) {
    for (const std::size_t more : {0, 1, 7, 63, 64, 65}) {
      sizes.push_back(about - more);
      sizes.push_back(about + more);
    }
  }
  std::erase_if(sizes, [most](std::size_t size) { return size > most; });
  return sizes;
}

void checksums() {
  const std::uint32_t start = 0x12345678;
  for (const std::size_t size : sizes_up_to(20000)) {
    const std::vector<std::uint8_t> data = noise(size, size + 1);
    const std::uint32_t right = by_bits(start, data);
    for (const Place place : kPlaces) {
      const Room room(size, place);
      room.fill(data);
      expect(crc32c(start, room.span()) == right, "crc32c", size, 0);
      std::size_t number = 0;
      for (const Crc32cKernel& kernel : crc32c_kernels()) {
        expect(~kernel.run(~start, room.data(), size) == right, kernel.name, size, number++);
      }
    }
    for (const std::size_t cut : {std::size_t{0}, size / 3, size}) {
      const Bytes first = Bytes(data).first(cut), second = Bytes(data).subspan(cut);
      const std::uint32_t combined = crc32c_combine(by_bits(start, first), by_bits(0, second), second.size());
      expect(combined == right, "crc32c_combine", size, cut);
    }
  }
  for (const std::uint64_t length : {std::uint64_t{0}, std::uint64_t{1} << 63, ~std::uint64_t{0}}) {
    expect(crc32c_combine(0, 7, length) == 7, "crc32c_combine of nothing with a long piece", 0, 0);
  }
}

void copies() {
  for (const std::size_t size : sizes_up_to(2 << 20)) {
    const std::vector<std::uint8_t> data = noise(size, size + 3);
    const std::uint32_t right = size <= 20000 ? by_bits(9, data) : crc32c(9, data);
    for (const Place from : kPlaces) {
      for (const Place to : kPlaces) {
        const Room source(size, from), target(size, to);
        source.fill(data);
        expect(copy_crc32c(target.data(), source.span(), 9) == right, "checksum of copy_crc32c", size, 0);
        expect(target.holds(data), "copy of copy_crc32c", size, 0);
        for (const Crc32cKernel& kernel : crc32c_kernels()) {
          const Room other(size, to);
          expect(copy_crc32c_by(kernel, other.data(), source.span(), 9) == right, kernel.name, size, 1);
          expect(other.holds(data), "copy of a kernel", size, 1);
        }
        const Room shared(size, to);
        const std::size_t cut = size / 3;
        const Part parts[] = {{shared.data(), source.span().first(cut)},
                              {nullptr, source.span().subspan(cut)},
                              {shared.data() + cut, source.span().subspan(cut)}};
        const Copied copied = copy_parts(parts, {std::size_t{1} << 40, 9, 1, 3});
        const std::uint32_t twice = crc32c(right, source.span().subspan(cut));
        expect(copied.tail_crc == twice && copied.block_crcs.empty(), "checksum of copy_parts", size, 0);
        expect(shared.holds(data), "copy of copy_parts", size, 0);
      }
    }
  }
}

// Both ends of a stream, and a pipe that cancels.
struct Ends {
  int sender, receiver, cancelled, canceller;

  Ends() {
    int pair[2], ends[2];
    expect(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0 && pipe(ends) == 0, "socketpair", 0, 0);
    sender = pair[0], receiver = pair[1], cancelled = ends[0], canceller = ends[1];
  }
  ~Ends() {
    close_sender();
    for (const int fd : {receiver, cancelled, canceller}) close(fd);
  }
  Ends(const Ends&) = delete;
  Ends& operator=(const Ends&) = delete;

  void close_sender() {
    if (sender >= 0) close(sender);
    sender = -1;
  }
  // In pieces of `piece` bytes, so that the receiver sees short reads.
  void send_all(Bytes data, std::size_t piece) const {
    while (!data.empty()) {
      const ssize_t count = send(sender, data.data(), std::min(piece, data.size()), MSG_NOSIGNAL);
      expect(count > 0, "send", data.size(), static_cast<std::size_t>(errno));
      data = data.subspan(static_cast<std::size_t>(count));
    }
  }
  void cancel() const { expect(write(canceller, "x", 1) == 1, "write to the pipe", 1, 0); }
};

ReceiveOptions options(std::size_t block_size, double timeout_s, double slice_s, int cancel_fd) {
  return {block_size, std::chrono::duration<double>(timeout_s), std::chrono::duration<double>(slice_s), cancel_fd, 0, 0};
}

constexpr double kLong = 20, kShort = 0.03, kNever = 1e9;

// A whole stream in slices, the first block of which began `prefix` bytes earlier.
void receive_stream(std::size_t size, std::size_t block, std::size_t prefix, std::size_t piece, double slice, Place at) {
  const std::vector<std::uint8_t> whole = noise(prefix + size, size + piece);
  const Bytes data = Bytes(whole).subspan(prefix);
  const Ends ends;
  std::thread sending([&] { ends.send_all(data, piece); });
  const Room room(size, at);
  std::vector<std::uint32_t> crcs;
  ReceiveOptions how = options(block, kLong, slice, ends.cancelled);
  how.prefix_crc = by_bits(0, Bytes(whole).first(prefix));
  how.prefix_size = prefix;
  std::size_t done = 0;
  std::uint32_t tail = how.prefix_crc;
  while (done < size) {
    const Received got = receive(ends.receiver, room.span().subspan(done), how);
    expect(got.error == 0 && got.size > 0, "receive", size, static_cast<std::size_t>(got.error));
    crcs.insert(crcs.end(), got.block_crcs.begin(), got.block_crcs.end());
    done += got.size;
    how.prefix_crc = tail = got.tail_crc;
    how.prefix_size = (prefix + done) % block;
  }
  sending.join();
  expect(room.holds(data), "received bytes", size, piece);
  if ((prefix + size) % block != 0) crcs.push_back(tail);
  std::size_t number = 0;
  for (Bytes rest(whole); size != 0 && !rest.empty(); ++number) {
    const Bytes one = rest.first(std::min(block, rest.size()));
    expect(number < crcs.size() && crcs[number] == by_bits(0, one), "checksum of a received block", size, number);
    rest = rest.subspan(one.size());
  }
  expect(size == 0 || number == crcs.size(), "number of received blocks", size, crcs.size());
}

void receives() {
  for (const Place at : kPlaces) {
    for (const std::size_t size : {0, 1, 63, 4095, 4096, 4097, 20011}) {
      receive_stream(size, 4096, 0, 1 << 20, kNever, at);
      receive_stream(size, 4096, 1000, 1777, 0, at);
      receive_stream(size, 1, 0, 1 << 20, kNever, at);
    }
    receive_stream(300, 7, 3, 1, 0, at);
    receive_stream((2 << 20) + 5, 3 << 19, 4097, 70001, kNever, at);
  }

  std::vector<std::uint8_t> target(1000);
  const std::vector<std::uint8_t> data = noise(600, 5);
  {
    Ends ends;
    ends.send_all(data, 600);
    ends.close_sender();
    const Received got = receive(ends.receiver, target, options(256, kLong, kNever, ends.cancelled));
    expect(got.error == ENODATA && got.size == 600 && got.block_crcs.size() == 2, "peer closes", got.size, 0);
    expect(got.tail_crc == by_bits(0, Bytes(data).subspan(512)), "checksum of the tail", got.size, 0);
  }
  {
    const Ends ends;
    ends.send_all(data, 600);
    const Received got = receive(ends.receiver, target, options(256, kShort, kNever, -1));
    expect(got.error == ETIME && got.size == 600, "deadline", got.size, static_cast<std::size_t>(got.error));
  }
  for (const double strange : {-1.0, 0.0, std::strtod("-inf", nullptr), std::strtod("nan", nullptr)}) {
    const Ends ends;
    const Received got = receive(ends.receiver, target, options(256, strange, strange, -1));
    expect(got.error == ETIME, "a deadline that is over", 0, static_cast<std::size_t>(got.error));
  }
  {
    const Ends ends;
    ends.cancel();
    ends.send_all(data, 600);
    const Received got = receive(ends.receiver, target, options(256, kLong, kNever, ends.cancelled));
    expect(got.error == ECANCELED && got.size == 0, "cancelled before", got.size, static_cast<std::size_t>(got.error));
  }
  for (const double wait_s : {kLong, std::strtod("inf", nullptr)}) {
    const Ends ends;
    ends.send_all(data, 600);
    std::thread cancelling([&] {
      // Once the receiver took what there was it can only wait.
      for (int left = 1; left != 0; std::this_thread::yield()) {
        expect(recv(ends.receiver, target.data(), 1, MSG_PEEK | MSG_DONTWAIT) >= 0 || errno == EAGAIN, "peek", 0, 0);
        left = errno != EAGAIN;
      }
      ends.cancel();
    });
    const Received got = receive(ends.receiver, target, options(256, wait_s, kNever, ends.cancelled));
    cancelling.join();
    expect(got.error == ECANCELED && got.size == 600, "cancelled", got.size, static_cast<std::size_t>(got.error));
  }
  {
    const Ends ends;
    expect(receive(ends.canceller, target, options(256, kLong, kNever, -1)).error == ENOTSOCK, "a pipe", 0, 0);
    expect(receive(-1, target, options(256, kLong, kNever, -1)).error == EBADF, "no descriptor", 0, 0);
    expect(receive(-1, {}, options(256, kLong, kNever, -1)).error == 0, "nothing wanted", 0, 0);
  }
}

int misuse(const std::string& what) {
  const std::size_t size = what == "overrun-stream" ? 2 << 20 : 1000;
  const Room exact(size, what == "overrun-stream" ? Place::kBeforeWall : Place::kHeap);
  const std::vector<std::uint8_t> more(size + 64);
  if (what == "overrun-read") return static_cast<int>(crc32c(0, Bytes(exact.data(), size + 1)) & 1);
  if (what == "overrun-write" || what == "overrun-stream") {
    return static_cast<int>(copy_crc32c(exact.data(), more, 0) & 1);
  }
  if (what == "undefined") {
    volatile int number = INT_MAX;
    number = number + 1;
    return 0;
  }
  std::fprintf(stderr, "unknown: %s\n", what.c_str());
  return 2;
}

}  // namespace

int main(int count, char** words) {
  if (count > 1) return misuse(words[1]);
  checksums();
  copies();
  receives();
  std::printf("kernels:");
  for (const Crc32cKernel& kernel : crc32c_kernels()) std::printf(" %s", kernel.name);
  std::printf("\n");
  return 0;
}
