// BytePS's worker without its GPUs and trainer: ps-lite's KVWorker and BytePS's compressors behind a C interface, for tests. It is compiled together with
// the sources of byteps 0.2.5.post15 (stock.py) and sends what that version's InitTensor, RunPushLoopOnce and RunPullLoopOnce send.
#include <cstring>
#include <memory>
#include <string>
#include "ps/ps.h"
#include "byteps/common/compressor/compressor.h"
#include "byteps/common/compressor/compressor_registry.h"
#include "byteps/common/compressor/utils.h"

using namespace byteps::common;

static ps::KVWorker<char>* worker;

extern "C" {

void client_start() {
  worker = new ps::KVWorker<char>(0, 0);
  ps::StartAsync(0, "byteps\0");
  ps::Postoffice::Get()->Barrier(0, ps::kWorkerGroup + ps::kServerGroup + ps::kScheduler);
}

int client_rank() { return ps::MyRank(); }

void client_barrier(int group) { ps::Postoffice::Get()->Barrier(0, group); }

void client_finish() { ps::Finalize(0, true); }

// As EncodeDefaultKey: the server's range begins the key.
static ps::SArray<ps::Key> encoded(int server, uint64_t key) {
  ps::SArray<ps::Key> keys;
  keys.push_back(ps::Postoffice::Get()->GetServerKeyRanges()[server].begin() + key);
  return keys;
}

void client_push(int server, uint64_t key, char* data, int size, int cmd) {
  ps::SArray<char> vals(data, size, false);
  ps::SArray<int> lens;
  lens.push_back(size);
  worker->Wait(worker->ZPush(encoded(server, key), vals, lens, cmd));
}

int client_pull(int server, uint64_t key, char* data, int size, int cmd) {
  ps::SArray<char> vals(data, size, false);
  ps::SArray<int> lens;
  lens.push_back(size);
  worker->Wait(worker->ZPull(encoded(server, key), &vals, &lens, cmd));
  return lens[0];
}

void* compressor_new(const char* text, int size, int dtype) {
  auto kwargs = compressor::Deserialize(text);
  return compressor::CompressorRegistry::Create(kwargs, Align(size, dtype), static_cast<DataType>(dtype)).release();
}

int compressor_encode(void* made, char* data, int size, int dtype, char* out) {
  auto done = static_cast<compressor::Compressor*>(made)->Compress(compressor::tensor_t(data, size, dtype));
  std::memcpy(out, done.data, done.size);
  return done.size;
}

void compressor_decode(void* made, char* data, int size, int dtype, char* out, int out_size) {
  auto done = static_cast<compressor::Compressor*>(made)->Decompress(compressor::tensor_t(data, size, dtype));
  std::memcpy(out, done.data, out_size);
}
}
