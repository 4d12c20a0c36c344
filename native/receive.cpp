#include "receive.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cmath>

#include "crc32c.h"

namespace replicator {
namespace {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

constexpr std::size_t kWindow = 1 << 20;
// While bytes keep coming there is no wait that would notice a cancellation: look for it this often.
constexpr std::size_t kCheckEvery = 4 << 20;

// Waits for bytes. 0: there are some (or an error that the next recv will tell); else an errno.
int wait_readable(int fd, int cancel_fd, Seconds timeout) {
  pollfd fds[2] = {{fd, POLLIN, 0}, {cancel_fd, POLLIN, 0}};
  const Clock::time_point begin = Clock::now();
  while (true) {
    const Seconds left = timeout - (Clock::now() - begin);
    const double ms = std::ceil(left.count() * 1000);
    // What is not greater than 0, be it no number at all, is over; poll takes any negative number for "for ever".
    const int ready = poll(fds, 2, ms > 0 ? static_cast<int>(std::min(ms, 1e9)) : 0);
    if (ready < 0 && errno != EINTR) return errno;
    if (ready > 0) return fds[1].revents != 0 ? ECANCELED : 0;
    if (ready == 0) return ETIME;
  }
}

// The checksums of a stream of bytes that is cut into blocks.
class Blocks {
 public:
  Blocks(const ReceiveOptions& options, Received& result)
      : result_(result), block_size_(options.block_size), filled_(options.prefix_size) {
    result_.tail_crc = options.prefix_crc;
  }

  std::size_t room() const { return block_size_ - filled_; }

  void add(Bytes piece) {
    result_.tail_crc = crc32c(result_.tail_crc, piece);
    filled_ += piece.size();
    if (filled_ == block_size_) {
      result_.block_crcs.push_back(result_.tail_crc);
      result_.tail_crc = 0;
      filled_ = 0;
    }
  }

 private:
  Received& result_;
  const std::size_t block_size_;
  std::size_t filled_;
};

}  // namespace

Received receive(int fd, std::span<std::uint8_t> target, const ReceiveOptions& options) {
  Received result;
  Blocks blocks(options, result);
  const Clock::time_point begin = Clock::now();
  std::size_t unchecked = kCheckEvery;  // bytes since the last look at cancel_fd

  while (result.size < target.size()) {
    if (unchecked >= kCheckEvery) {
      pollfd cancel = {options.cancel_fd, POLLIN, 0};
      if (poll(&cancel, 1, 0) > 0) {
        result.error = ECANCELED;
        return result;
      }
      unchecked = 0;
    }
    const std::size_t want = std::min({target.size() - result.size, kWindow, blocks.room()});
    const ssize_t count = recv(fd, target.data() + result.size, want, MSG_DONTWAIT);
    if (count > 0) {
      const auto got = static_cast<std::size_t>(count);
      blocks.add(Bytes(target.data() + result.size, got));
      result.size += got;
      unchecked += got;
      if (Clock::now() - begin >= options.slice) return result;
      continue;
    }
    if (count == 0) {
      result.error = ENODATA;
      return result;
    }
    if (errno == EINTR) continue;
    if (errno != EAGAIN && errno != EWOULDBLOCK) {
      result.error = errno;
      return result;
    }
    result.error = wait_readable(fd, options.cancel_fd, options.progress_timeout);
    if (result.error != 0) return result;
  }
  return result;
}

}  // namespace replicator
