-- wrk's requests and its output: the body of BENCH_BODY with each key of BENCH_TOKENS in turn, and its summary as a line of JSON.
local function read(name)
  local file = assert(io.open(os.getenv(name), "rb"))
  local text = file:read("*a")
  file:close()
  return text
end

local tokens, prepared, turn = {}, {}, 0
for token in read("BENCH_TOKENS"):gmatch("%S+") do tokens[#tokens + 1] = token end

wrk.method = "POST"
wrk.body = read("BENCH_BODY")
wrk.headers["Content-Type"] = "application/json"
wrk.headers["Authorization"] = "Bearer " .. tokens[1]

if #tokens > 1 then
  function init()
    for i, token in ipairs(tokens) do
      wrk.headers["Authorization"] = "Bearer " .. token
      prepared[i] = wrk.format()
    end
  end
  function request()
    turn = turn % #prepared + 1
    return prepared[turn]
  end
end

function done(summary, latency)
  local errors = summary.errors
  io.write(string.format(
    'RESULT {"requests":%d,"bytes":%d,"microseconds":%d,"p50":%d,"p99":%d,"p999":%d,' ..
    '"connect":%d,"read":%d,"write":%d,"status":%d,"timeout":%d}\n',
    summary.requests, summary.bytes, summary.duration, latency:percentile(50), latency:percentile(99),
    latency:percentile(99.9),
    errors.connect, errors.read, errors.write, errors.status, errors.timeout))
end
