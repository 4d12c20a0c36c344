// The Python face of native/. Arguments are checked, and what is wrong with them said well, in replicator/native.py;
// here again whatever would end the interpreter or never return, for who calls this module itself.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <deque>
#include <string>
#include <tuple>
#include <vector>

#include "copy_crc32c.h"
#include "crc32c.h"
#include "receive.h"

namespace nb = nanobind;
using namespace replicator;

namespace {

// From this size on other threads may run meanwhile.
constexpr std::size_t kReleaseFrom = 16 << 10;

// A C-contiguous buffer of a Python object, held while this lives.
class Buffer {
 public:
  Buffer(nb::handle object, int flags) {
    if (PyObject_GetBuffer(object.ptr(), &view_, flags) != 0) throw nb::python_error();
  }
  ~Buffer() { PyBuffer_Release(&view_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  std::size_t size() const { return static_cast<std::size_t>(view_.len); }
  std::uint8_t* data() const { return static_cast<std::uint8_t*>(view_.buf); }
  Bytes bytes() const { return {data(), size()}; }

 private:
  Py_buffer view_;
};

template <typename Work>
auto without_gil(std::size_t size, const Work& work) {
  if (size < kReleaseFrom) return work();
  nb::gil_scoped_release released;
  return work();
}

std::uint32_t py_crc32c(nb::handle object, std::uint32_t value) {
  const Buffer buffer(object, PyBUF_SIMPLE);
  return without_gil(buffer.size(), [&] { return crc32c(value, buffer.bytes()); });
}

std::uint32_t py_crc32c_by(const std::string& kernel, nb::handle object, std::uint32_t value) {
  const Buffer buffer(object, PyBUF_SIMPLE);
  for (const Crc32cKernel& known : crc32c_kernels()) {
    if (kernel == known.name) return ~known.run(~value, buffer.data(), buffer.size());
  }
  throw nb::key_error(kernel.c_str());
}

std::vector<std::string> py_kernels() {
  std::vector<std::string> names;
  for (const Crc32cKernel& kernel : crc32c_kernels()) names.emplace_back(kernel.name);
  return names;
}

[[noreturn]] void refuse(const std::string& text) { throw nb::value_error(text.c_str()); }

void check_room(const Buffer& to, const Buffer& from) {
  if (to.size() < from.size()) {
    refuse("expected a target of at least " + std::to_string(from.size()) + " bytes, found " +
           std::to_string(to.size()));
  }
}

void check_blocks(std::size_t block_size, std::size_t prefix_size = 0) {
  if (block_size == 0) refuse("block_size: expected a positive number of bytes, found 0");
  if (prefix_size >= block_size) {
    refuse("prefix_size: expected 0.." + std::to_string(block_size - 1) + ", found " + std::to_string(prefix_size));
  }
}

std::uint32_t py_copy_crc32c(nb::handle target, nb::handle source, std::uint32_t value) {
  const Buffer to(target, PyBUF_WRITABLE);
  const Buffer from(source, PyBUF_SIMPLE);
  check_room(to, from);
  return without_gil(from.size(), [&] { return copy_crc32c(to.data(), from.bytes(), value); });
}

std::uint32_t py_copy_crc32c_by(const std::string& kernel, nb::handle target, nb::handle source, std::uint32_t value) {
  const Buffer to(target, PyBUF_WRITABLE);
  const Buffer from(source, PyBUF_SIMPLE);
  check_room(to, from);
  for (const Crc32cKernel& known : crc32c_kernels()) {
    if (kernel == known.name) return copy_crc32c_by(known, to.data(), from.bytes(), value);
  }
  throw nb::key_error(kernel.c_str());
}

// `parts`: a list of (target or None, source).
std::tuple<std::vector<std::uint32_t>, std::uint32_t> py_copy_parts(const nb::list& parts, std::size_t block_size,
                                                                    std::uint32_t prefix_crc, std::size_t prefix_size,
                                                                    unsigned threads) {
  check_blocks(block_size, prefix_size);
  std::deque<Buffer> held;
  std::vector<Part> native;
  std::size_t size = 0;
  // By index: asking an object for its buffer may run Python code, which may shorten the list.
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const nb::object part = parts[i];
    if (!PyTuple_Check(part.ptr()) || PyTuple_GET_SIZE(part.ptr()) != 2) {
      throw nb::type_error("expected parts that are tuples of a target (or None) and a source");
    }
    const auto pair = nb::borrow<nb::tuple>(part);
    const Buffer& from = held.emplace_back(pair[1], PyBUF_SIMPLE);
    std::uint8_t* target = nullptr;
    if (!pair[0].is_none()) {
      const Buffer& to = held.emplace_back(pair[0], PyBUF_WRITABLE);
      check_room(to, from);
      target = to.data();
    }
    native.push_back({target, from.bytes()});
    size += from.size();
  }
  const CopyOptions options{block_size, prefix_crc, prefix_size, threads};
  Copied copied = without_gil(size, [&] { return copy_parts(native, options); });
  return {std::move(copied.block_crcs), copied.tail_crc};
}

std::vector<std::uint32_t> py_block_crcs(nb::handle object, std::size_t block_size) {
  check_blocks(block_size);
  const Buffer buffer(object, PyBUF_SIMPLE);
  return without_gil(buffer.size(), [&] {
    std::vector<std::uint32_t> crcs;
    for (Bytes rest = buffer.bytes(); !rest.empty();) {
      const Bytes block = rest.first(std::min(block_size, rest.size()));
      crcs.push_back(crc32c(0, block));
      rest = rest.subspan(block.size());
    }
    return crcs;
  });
}

std::tuple<std::size_t, std::vector<std::uint32_t>, std::uint32_t, int> py_recv_blocks(
    int fd, nb::handle target, std::size_t block_size, double progress_timeout_s, double slice_s, int cancel_fd,
    std::uint32_t prefix_crc, std::size_t prefix_size) {
  check_blocks(block_size, prefix_size);
  const Buffer buffer(target, PyBUF_WRITABLE);
  const ReceiveOptions options{block_size, std::chrono::duration<double>(progress_timeout_s),
                               std::chrono::duration<double>(slice_s), cancel_fd, prefix_crc, prefix_size};
  Received got;
  {
    nb::gil_scoped_release released;
    got = receive(fd, {buffer.data(), buffer.size()}, options);
  }
  return {got.size, std::move(got.block_crcs), got.tail_crc, got.error};
}

}  // namespace

NB_MODULE(_native, module) {
  module.doc() = "Checksums, the copy that computes one, and the receive that computes one per block.";
  module.def("crc32c", &py_crc32c);
  module.def("crc32c_combine", &crc32c_combine);
  module.def("copy_crc32c", &py_copy_crc32c);
  module.def("copy_parts", &py_copy_parts);
  module.def("block_crcs", &py_block_crcs);
  module.def("recv_blocks", &py_recv_blocks);
  module.def("kernels", &py_kernels, "Ways to compute a CRC32C on this processor, best first: that one is used.");
  module.def("crc32c_by", &py_crc32c_by, "CRC32C by one of kernels().");
  module.def("copy_crc32c_by", &py_copy_crc32c_by, "copy_crc32c by one of kernels().");
}
